"""Resumed and verified downloads of published archives, and unpacking."""

import hashlib
import http.client
import re
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

from captioning.errors import InputError, one_line
from captioning.progress import Progress

CHUNK = 1 << 20  # bytes
ATTEMPTS = 5
PAUSE = 2.0  # seconds before the second attempt; then four, nine, sixteen times as long
TIMEOUT = 60.0  # seconds without an answer


def fetch(url: str, path: Path, *, md5: str | None = None) -> None:
    """Download ``url`` to ``path`` unless that file exists, and check its MD5.

    An incomplete file ends in ``.part``; the next call resumes it. Raises InputError if the download fails or the file
    is not the published one.
    """
    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part_file = path.with_name(path.name + ".part")
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE * attempt**2)
        try:
            _receive(url, part_file)
            break
        except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
            code, reason = getattr(error, "code", 0), one_line(error)
            if code == 416:  # nothing is left to send
                break
            is_final = 400 <= code < 500 and code not in (408, 429)  # 408 and 429 are a busy server's
            if is_final or attempt + 1 == ATTEMPTS:
                again = "" if is_final else "run the same command again to resume, or "
                raise InputError(f"{url}: {reason}; {again}download the file to {path}") from error
            print(f"{path.name}: {reason}; attempt {attempt + 1} of {ATTEMPTS}", flush=True)
    digest = hashlib.md5(usedforsecurity=False)
    with part_file.open("rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            digest.update(chunk)
    if md5 not in (None, digest.hexdigest()):
        part_file.unlink()  # the wrong bytes are unknown, so the download cannot be resumed
        raise InputError(f"{url}: its MD5 is not the published {md5}; download it again")
    part_file.rename(path)


def _receive(url: str, part_file: Path) -> None:
    """Send one request and append its answer to ``part_file``."""
    received = part_file.stat().st_size if part_file.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={received}-"} if received else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        received = received if response.status == 206 else 0  # otherwise the server cannot resume
        length = response.headers.get("Content-Length")
        total = None if length is None else received + int(length)
        progress = Progress(part_file.stem, total, received, unit="B")
        with progress, part_file.open("ab" if received else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                received += len(chunk)
                progress.update(len(chunk))
    if total not in (None, received):
        raise ConnectionError("the connection broke")


def unpack(path: Path, root: Path, pattern: str, *, flat: bool = False) -> None:
    """Write the files of a zip or tar archive below ``root`` if their names match ``pattern``.

    Skips complete files. ``flat`` drops folders and capitals from names. Raises InputError for a damaged archive.
    """
    try:
        members: list[tuple[str, int, Any]]
        with zipfile.ZipFile(path) if path.suffix.lower() == ".zip" else tarfile.open(path) as archive:
            if isinstance(archive, zipfile.ZipFile):
                read: Any = archive.open
                members = [(info.filename, info.file_size, info) for info in archive.infolist() if not info.is_dir()]
            else:
                read = archive.extractfile
                members = [(info.name, info.size, info) for info in archive if info.isfile()]
            files = [member for member in members if re.search(pattern, member[0])]
            for name, size, info in Progress(f"{path.name}: unpacking", len(files), items=files, unit=" files"):
                target = root / (PurePosixPath(name).name.lower() if flat else name)
                if not (target.is_file() and target.stat().st_size == size):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with read(info) as source, target.open("wb") as file:
                        shutil.copyfileobj(source, file, CHUNK)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError) as error:
        raise InputError(f"{path}: damaged ({error}); download it again") from error
