"""Files that a crash cannot leave half written, the cache folder, and JSON.

A file is written under a temporary name, synced to the disk, and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

from captioning.errors import InputError, one_line


def cache_folder(name: str = "") -> Path:
    """Return the folder in the user's cache for what can be computed again, or a place in it. It may not exist yet.

    It never lies below the working directory by chance, because code is loaded from it.
    """
    try:
        folder = platformdirs.user_cache_path("captioning", appauthor=False)
    except RuntimeError:  # the user has no home folder
        folder = _temporary_cache()
    return (folder if folder.is_absolute() else _temporary_cache()) / name


@functools.cache
def _temporary_cache() -> Path:
    """Return a folder in the system's temporary one that nobody else can write to, because code is loaded from it."""
    folder = Path(tempfile.gettempdir()) / f"captioning-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if private else Path(tempfile.mkdtemp(prefix="captioning-"))


def part_of(path: Path) -> Path:
    """Return the name that a file has until it is complete."""
    return path.with_name(path.name + ".part")


def complete(path: Path, part: Path | None = None, *, sync: bool = True) -> None:
    """Sync ``part``, by default ``part_of(path)``, to the disk and rename it to ``path``.

    A crash leaves the old file or the new one.
    """
    part = part or part_of(path)
    if sync:
        with part.open("rb+") as file:
            os.fsync(file.fileno())
    os.replace(part, path)


@contextmanager
def errors_named(path: Path, option: str = "") -> Iterator[None]:
    """Turn an OSError into the InputError of a file that cannot be written.

    Args:
        path: The file.
        option: The option of the command line that named the file.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be written ({error.strerror or error})".lstrip()) from error


def destination(path: Path, option: str = "", *, follow: bool = True) -> Path:
    """Return the file that is written under ``path``: the target of a link, so that the link stays one.

    Raises:
        InputError: The target is a device, a pipe or a folder, or a link is not to be followed.
    """
    if path.is_symlink() and not follow:
        raise InputError(f"{path}: is a link, through which nothing is written here; remove it")
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.exists() and not target.is_file():
        raise InputError(f"{option} {path}: cannot be written (is no regular file)".lstrip())
    return target


def refuse_inputs(output: str | Path, inputs: Iterable[str | Path], option: str) -> None:
    """Refuse an output that would replace a file that is read.

    Raises:
        InputError: ``output`` is one of the inputs, by whatever name or link.
    """
    for path in inputs:
        try:
            same = os.path.samefile(path, output)
        except (OSError, ValueError):  # one of them does not exist
            continue
        if same:
            raise InputError(f"{option} {output}: would replace {path}, which is an input; give another name")


@contextmanager
def replacing(
    path: Path, option: str = "", *, sync: bool = True, shared: bool = False, follow: bool = True
) -> Iterator[Path]:
    """Yield a temporary name beside ``path``, which is renamed to ``path`` when the block ends without an error.

    After an error the file is unchanged. Folders are made as needed. A link stays one: its target is replaced.

    Args:
        path: The file.
        option: The option of the command line that named the file.
        sync: False does not wait for the disk; for many files that can be made again.
        shared: Several processes may write the file at once, under different temporary names; the last one wins.
        follow: False refuses a link: the user did not name the file, and its folder may have been sent.

    Raises:
        InputError: The file cannot be written, or is a device or a link.
    """
    with errors_named(path, option):
        path = destination(path, option, follow=follow)
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part") if shared else part_of(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)  # of an earlier process, or a link that would be followed
        part.touch(exist_ok=False)
        try:
            yield part
            complete(path, part, sync=sync)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def regular(path: str, flags: int) -> int:
    """Open a file as ``open(path, opener=regular)`` does: a regular one, because a pipe would be waited for.

    Raises:
        OSError: The file is a pipe, a device or a folder, or cannot be opened.
    """
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    reason = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "is no regular file"
    raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, reason, path)


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file. The errors are those of ``regular``."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 checksum of a file, in hexadecimal.

    Raises:
        InputError: The file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def read_json(path: Path, what_to_do: str = "") -> Any:
    """Return the content of a JSON file.

    Args:
        path: The file.
        what_to_do: Advice for the error message.

    Raises:
        InputError: The file cannot be read, or is not JSON.
    """
    advice = f"; {what_to_do}" if what_to_do else ""
    try:
        return json.loads(read_bytes(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}){advice}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({one_line(error, 120)}){advice}") from error


def write_text(path: Path, text: str, option: str = "", *, follow: bool = True) -> None:
    with replacing(path, option, follow=follow) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")  # escaped as in JSON


def write_json(path: Path, content: Any, *, indent: int | None = 1, follow: bool = True) -> None:
    write_text(path, json.dumps(content, ensure_ascii=False, indent=indent) + "\n", follow=follow)
