"""Files that a crash cannot leave half written, the cache folder, and JSON."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import platformdirs

from captioning.errors import InputError, one_line


def cache_folder(name: str = "") -> Path:
    """Return the folder in the user's cache for what can be computed again, or a place in it. It may not exist yet."""
    try:
        folder = platformdirs.user_cache_path("captioning", appauthor=False)
    except RuntimeError:  # the user has no home folder
        folder = Path(tempfile.gettempdir(), f"captioning-{os.getuid()}")
    return folder / name


@contextmanager
def replacing(path: Path, option: str = "") -> Iterator[Path]:
    """Yield a temporary name beside ``path``, which is renamed to ``path`` when the block ends without an error.

    After an error or a crash the file is unchanged. Folders are made as needed. A link stays one: its target is
    replaced. Several processes may write the file at once; the last one wins.

    Args:
        path: The file.
        option: The option of the command line that named the file.

    Raises:
        InputError: The file cannot be written.
    """
    path = path.resolve() if path.is_symlink() else path
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be written ({error.strerror or error})".lstrip()) from error
    finally:
        with suppress(OSError):
            part.unlink()


def write_text(path: Path, text: str, option: str = "") -> None:
    with replacing(path, option) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")  # escaped as in JSON


def write_json(path: Path, content: Any, *, indent: int | None = 1) -> None:
    write_text(path, json.dumps(content, ensure_ascii=False, indent=indent) + "\n")


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
        return json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}){advice}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({one_line(error, 120)}){advice}") from error


def refuse_inputs(output: str | Path, inputs: Iterable[str | Path], option: str) -> None:
    """Refuse an output that would replace a file that is read.

    Raises:
        InputError: ``output`` is one of the inputs, by whatever name or link.
    """
    for path in inputs:
        if os.path.exists(output) and os.path.exists(path) and os.path.samefile(path, output):
            raise InputError(f"{option} {output}: would replace {path}, which is an input; give another name")


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is the short text that a clone without git-LFS has in place of a large file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(40).startswith(b"version https://git-lfs.github.com/")


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
