"""Downloads of published archives, which resume and are verified, and their unpacking."""

from __future__ import annotations

import hashlib
import http.client
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from captioning.errors import InputError
from captioning.progress import Progress

CHUNK = 1 << 20  # bytes
ATTEMPTS = 5
PAUSE = 2.0  # seconds before the second attempt; doubles with each
TIMEOUT = 60.0  # seconds without an answer


def fetch(url: str, path: Path, *, md5: str | None = None) -> None:
    """Download ``url`` to ``path`` unless that file exists, resuming an earlier download, and compare its checksum.

    Until it is complete, the file's name ends in ``.part``.

    Raises:
        InputError: It cannot be downloaded, or is not the published file.
    """
    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    reason = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            print(f"{path.name}: {reason}; trying again", flush=True)
            time.sleep(PAUSE * 2 ** (attempt - 1))
        try:
            if _receive(url, part):
                break
            reason = "the connection broke"
        except urllib.error.HTTPError as error:
            error.close()
            if error.code < 500 and error.code not in (408, 429):
                raise InputError(f"{url}: the server says {error.code}; download it by hand to {path}") from error
            reason = f"the server says {error.code}"
        except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error))
    else:
        raise InputError(f"{url}: {reason}; run the same command again to resume, or download the file to {path}")
    digest = hashlib.md5(usedforsecurity=False)
    with part.open("rb") as file:
        while md5 is not None and (chunk := file.read(CHUNK)):
            digest.update(chunk)
    if md5 not in (None, digest.hexdigest()):
        part.unlink()  # nobody knows which bytes are wrong, so it cannot be resumed
        raise InputError(f"{url}: its MD5 is not the published {md5}; download it again")
    part.rename(path)


def _receive(url: str, part: Path) -> bool:
    """Append the answer to one request to ``part``; return whether the file is complete."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is left to send
            return True
        raise
    with response:
        have = have if response.status == 206 else 0  # otherwise the server cannot resume
        length = response.headers.get("Content-Length")
        total = None if length is None else have + int(length)
        with part.open("ab" if have else "wb") as file, Progress(part.stem, total, have, unit="bytes") as progress:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                have += len(chunk)
                progress.update(have)
    return total is None or have == total


def unpack(path: Path, root: Path, wanted: Callable[[str], bool], *, flat: bool = False) -> None:
    """Write the wanted files of a zip or tar archive below ``root``; files that are complete are skipped.

    ``wanted`` takes a file's name in the archive; ``flat`` drops the folders of these names.

    Raises:
        InputError: The archive is damaged.
    """
    try:
        with zipfile.ZipFile(path) if path.suffix == ".zip" else tarfile.open(path) as archive:
            files: list[tuple[str, int, Callable[[Any], Any], Any]]
            if isinstance(archive, zipfile.ZipFile):
                files = [(info.filename, info.file_size, archive.open, info) for info in archive.infolist()]
            else:
                files = [(info.name, info.size, archive.extractfile, info) for info in archive if info.isfile()]
            files = [file for file in files if wanted(file[0]) and not file[0].endswith("/")]
            with Progress(f"{path.name}: unpacking", len(files), unit="files") as progress:
                for number, (name, size, read, info) in enumerate(files, 1):
                    target = root / (PurePosixPath(name).name if flat else name)
                    if not (target.is_file() and target.stat().st_size == size):
                        target.parent.mkdir(parents=True, exist_ok=True)
                        with read(info) as source, target.open("wb") as file:
                            shutil.copyfileobj(source, file, CHUNK)
                    progress.update(number)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError) as error:
        raise InputError(f"{path}: damaged ({error}); download it again") from error
