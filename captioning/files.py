"""Files that a crash cannot leave half written: under a temporary name, then synced and renamed; and reading JSON."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from captioning.errors import InputError, one_line


def cache_folder() -> Path:
    """Return the user's folder for what can be computed again; it may not be there yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "captioning"


def part_of(path: Path) -> Path:
    """Return the name that a file has until it is complete."""
    return path.with_name(path.name + ".part")


def complete(path: Path, part: Path | None = None, *, sync: bool = True) -> None:
    """Sync ``part``, by default ``part_of(path)``, to the disk and give it its name.

    A crash leaves the old file or the new one.
    """
    part = part or part_of(path)
    if sync:
        with part.open("rb+") as file:
            os.fsync(file.fileno())
    os.replace(part, path)


@contextmanager
def errors_named(path: Path, option: str = "") -> Iterator[None]:
    """Raise the InputError of a file that cannot be written in place of an OSError.

    Args:
        option: of the command line that named the file.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be written ({error.strerror or error})".lstrip()) from error


def destination(path: Path, option: str = "") -> Path:
    """Return the file that is written under ``path``: where links lead, so that they stay links.

    Raises:
        InputError: there is a device, a pipe or a folder.
    """
    found = Path(os.path.realpath(path)) if path.is_symlink() else path
    if found.exists() and not found.is_file():
        raise InputError(f"{option} {path}: cannot be written (is no regular file)".lstrip())
    return found


def refuse_inputs(output: str | Path, inputs: Iterable[str | Path], option: str) -> None:
    """Let no output replace a file that is read.

    Raises:
        InputError: ``output`` is one of the inputs, whatever name or link leads to it.
    """
    for path in inputs:
        try:
            same = os.path.samefile(path, output)
        except (OSError, ValueError):  # one of them is not there
            continue
        if same:
            raise InputError(f"{option} {output}: would replace {path}, which is an input; give another name")


@contextmanager
def replacing(path: Path, option: str = "", *, sync: bool = True, shared: bool = False) -> Iterator[Path]:
    """Yield a temporary name beside ``path``; what is written there gets its name when the block ends well.

    After an error the file is what it was before. Folders are made as needed.

    Args:
        option: of the command line that named the file.
        sync: False for files in great number that can be made again: each would wait for the disk.
        shared: several processes may write it at once, each under a temporary name of its own; the last one stays.

    A link stays one: what it leads to is replaced.

    Raises:
        InputError: the file cannot be written, or is a device.
    """
    with errors_named(path, option):
        path = destination(path, option)
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part") if shared else part_of(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield part
            complete(path, part, sync=sync)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def read_json(path: Path, what_to_do: str = "") -> Any:
    """Return what a JSON file holds.

    Args:
        what_to_do: if it cannot be read.

    Raises:
        InputError: it cannot be read, or is no JSON.
    """
    then = f"; {what_to_do}" if what_to_do else ""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}){then}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({one_line(error, 120)}){then}") from error


def write_text(path: Path, text: str, option: str = "") -> None:
    with replacing(path, option) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")  # of what UTF-8 cannot hold, as in JSON


def write_json(path: Path, content: Any, *, indent: int | None = 1) -> None:
    write_text(path, json.dumps(content, ensure_ascii=False, indent=indent) + "\n")
