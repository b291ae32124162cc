"""Downloads of published archives, which resume and are verified, and their unpacking."""

from __future__ import annotations

import errno
import gzip
import hashlib
import http
import http.client
import lzma
import re
import shutil
import struct
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from captioning.errors import InputError
from captioning.files import complete, part_of, replacing
from captioning.progress import Progress, size_text

CHUNK = 1 << 20  # bytes
ATTEMPTS = 5  # in a row without a byte of progress
PAUSE = 2.0  # seconds before the second attempt; doubles with each
TIMEOUT = 60.0  # seconds without an answer
LARGEST_IMAGE = 100_000_000  # bytes
_DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, RuntimeError, ValueError, OverflowError),
)
"""What Python raises for a damaged archive, depending on the place of the damage."""


def fetch(url: str, path: Path, *, size: int | None = None, md5: str | None = None) -> None:
    """Download ``url`` to ``path`` unless that file exists, and verify it.

    Args:
        url: The address.
        path: Where the file goes.
        size: Published bytes; None if unpublished.
        md5: Published checksum; None if unpublished.

    Raises:
        InputError: It cannot be downloaded, or is not the published file.
    """
    if path.is_file():
        verify(path, size=size, md5=md5)
        return
    part = download(url, path, size)
    try:
        verify(part, size=size, md5=md5)
    except InputError:
        part.unlink()  # nobody knows which bytes are wrong, so it cannot be resumed
        raise
    complete(path)


def fetch_image(url: str) -> bytes:
    """Return the content of an https address, at most ``LARGEST_IMAGE`` bytes; follows redirections only to https.

    Raises:
        InputError: The address is not https, does not answer, or has more bytes.
    """
    if not url.startswith("https://"):
        raise InputError(f"{url}: only https addresses are fetched; download it yourself and give the file")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            if not response.url.startswith("https://"):
                raise InputError(f"{url}: leads to {response.url}, which is not https")
            content = response.read(LARGEST_IMAGE + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise InputError(f"{url}: the server says {error.code} {error.reason}") from error
    except InputError:
        raise
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise InputError(f"{url}: {getattr(error, 'reason', error) or type(error).__name__}") from error
    if len(content) > LARGEST_IMAGE:
        raise InputError(f"{url}: has more than {size_text(LARGEST_IMAGE)}")
    return bytes(content)


def download(url: str, path: Path, size: int | None = None) -> Path:
    """Download ``url`` to ``path`` with ``.part`` appended, resuming an earlier download; return that path.

    Raises:
        InputError: The server lacks the file or has a different one, or the connection keeps breaking.
    """
    part = part_of(path)
    failures, reason = 0, ""
    while failures < ATTEMPTS:
        if failures:
            print(f"{path.name}: {reason}; trying again", flush=True)
            time.sleep(PAUSE * 2 ** (failures - 1))
        have = part.stat().st_size if part.exists() else 0
        try:
            if _receive(url, part, size):
                return part
            reason = "the connection broke"
        except urllib.error.HTTPError as error:
            error.close()
            if error.code < 500 and error.code not in (408, 429):
                raise InputError(
                    f"{url}: the server says {error.code} {error.reason}; download it by hand to {path}"
                ) from error
            reason = f"the server says {error.code} {error.reason}"
        except InputError:
            raise
        except ValueError as error:  # a redirect to what is no address
            raise InputError(f"{url}: {error}; download it by hand to {path}") from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise InputError(f"{part}: the disk is full; free some space and run the same command again") from error
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        now = part.stat().st_size if part.exists() else 0
        failures = 1 if now > have else failures + 1
    raise InputError(f"{url}: {reason}; run the same command again to resume, or download the file by hand to {path}")


def _receive(url: str, part: Path, size: int | None) -> bool:
    """Append the answer to one request to ``part``; return whether the file is complete."""
    have = part.stat().st_size if part.exists() else 0
    if size is not None and have >= size:
        if have == size:
            return True
        part.unlink()
        have = 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        error.close()
        if error.headers.get("Content-Range", "").rpartition("/")[2] == str(have):  # the whole file is here
            return True
        part.unlink()
        return False
    with response:
        if response.status == http.HTTPStatus.PARTIAL_CONTENT:
            span, _, whole = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
            if span.partition("-")[0] != str(have):
                raise OSError(f"asked for bytes from {have}, got {span or 'others'}")
            total = _size(whole, size)
        else:
            if have:
                print(f"{part.stem}: the server cannot resume a download, starting over", flush=True)
            have = 0
            total = _size(response.headers.get("Content-Length", ""), size)
        if size is not None and total != size:
            raise InputError(f"{url}: has {total} bytes, published were {size}; it is not the file it should be")
        with part.open("r+b" if have else "wb") as file, Progress(part.stem, total, have, unit="bytes") as progress:
            file.seek(have)
            while chunk := response.read(CHUNK):
                file.write(chunk)
                have += len(chunk)
                progress.update(have)
        return total is None or have == total


def _size(text: str, otherwise: int | None) -> int | None:
    """Return the number of bytes that a server's header names; ``otherwise`` if it names none."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else otherwise


def verify(path: Path, *, size: int | None = None, md5: str | None = None) -> None:
    """Compare a download with the published size and MD5; without an MD5, with the checksums inside the zip file.

    Raises:
        InputError: It differs.
    """
    actual = path.stat().st_size
    name = path.name.removesuffix(".part")
    if size is not None and actual != size:
        raise InputError(f"{path}: has {actual} bytes, published were {size}; delete it and run again")
    if md5 is not None:
        digest = hashlib.md5(usedforsecurity=False)
        with path.open("rb") as file, Progress(f"{name}: MD5", actual, unit="bytes") as progress:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                progress.update(file.tell())
        if digest.hexdigest() != md5:
            raise InputError(f"{path}: its MD5 is {digest.hexdigest()}, published was {md5}; download it again")
        print(f"{name}: MD5 is the published one", flush=True)
        return
    try:
        with zipfile.ZipFile(path) as file:
            bad = file.testzip()
    except (OSError, *_DAMAGE) as error:
        raise InputError(f"{path}: not a whole zip file ({error}); download it again") from error
    if bad is not None:
        raise InputError(f"{path}: {bad} in it is damaged; download it again")
    print(f"{name}: no checksum was published; its length and the checksums inside are right", flush=True)


def unpack(path: Path, root: Path, wanted: Callable[[str], bool], *, flat: bool = False) -> None:
    """Write the wanted files of a zip or tar archive below ``root``; files that are complete are skipped.

    Args:
        path: The archive.
        root: The folder to write to.
        wanted: Whether a file, by its name in the archive, is wanted.
        flat: Whether to drop the folders of these names.

    Raises:
        InputError: The archive is damaged, or a name in it leads out of ``root``.
    """
    with ExitStack() as stack:
        try:
            members = [m for m in _members(path, stack) if wanted(m.name)]
            total = sum(member.size for member in members)
            progress = stack.enter_context(Progress(f"{path.name}: unpacking", total, unit="bytes"))
            done = 0
            for member in members:
                name = PurePosixPath(member.name)
                if name.is_absolute() or ".." in name.parts:
                    raise InputError(f"{path}: {member.name} leads out of {root}; this is not the published file")
                target = root / (name.name if flat else name)
                if not (target.is_file() and target.stat().st_size == member.size):
                    with member.open() as source, replacing(target, sync=False) as part, part.open("wb") as file:
                        shutil.copyfileobj(source, file, CHUNK)
                done += member.size
                progress.update(done)
        except InputError:
            raise
        except _DAMAGE as error:
            raise InputError(f"{path}: damaged ({error}); download it again") from error


@dataclass(frozen=True)
class _Member:
    name: str
    size: int
    open: Callable[[], IO[bytes]]


def _members(path: Path, stack: ExitStack) -> Iterator[_Member]:
    """Yield the regular files of an archive; each may be opened until the stack closes."""
    if path.suffix == ".zip":
        file = stack.enter_context(zipfile.ZipFile(path))
        for info in file.infolist():
            if not info.filename.endswith("/"):  # a folder; is_dir() fails for an empty name
                yield _Member(info.filename, info.file_size, lambda info=info: file.open(info))  # type: ignore[misc]
    else:
        tar = stack.enter_context(tarfile.open(path))  # noqa: SIM115 - the stack closes it
        for entry in tar:
            if entry.isfile():
                yield _Member(entry.name, entry.size, lambda entry=entry: tar.extractfile(entry))  # type: ignore
        while tar.fileobj is not None and tar.fileobj.read(CHUNK):  # to its end, where the checksum is
            pass
