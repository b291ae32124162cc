"""Reading and writing files: atomic writing, JSON, and checks of output paths."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from captioning.errors import InputError, one_line

FIGURE_SUFFIXES = (".png", ".pdf", ".svg")
PAGE_SUFFIXES = (".html", ".htm")
JSON_SUFFIXES = (".json", ".jsonl")


@contextmanager
def replacing(path: Path, option: str = "") -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it to ``path`` when the block ends without an error.

    Makes missing folders. Replaces the target of a link. Raises InputError, which names ``option``, if that fails.
    """
    path = path.expanduser()
    path = path.resolve() if path.is_symlink() else path
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be written ({error.strerror or error})".lstrip()) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_text(path: Path, text: str, option: str = "") -> None:
    with replacing(path, option) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # escaped as in JSON


def write_json(path: Path, content: Any, *, indent: int | None = 1) -> None:
    write_text(path, json.dumps(content, ensure_ascii=False, indent=indent) + "\n")


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8. Raises InputError if it is in another encoding."""
    try:
        return path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not in UTF-8 ({one_line(error)}); save the file in UTF-8") from error


def read_json(path: Path, what_to_do: str = "", object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the content of a JSON file. Raises InputError, which ends in ``what_to_do``, if that fails."""
    advice = f"; {what_to_do}" if what_to_do else ""
    try:
        return json.loads(path.read_bytes(), object_hook=object_hook)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}){advice}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({one_line(error, 120)}){advice}") from error


def check_output(
    path: str | Path | None, option: str = "", suffixes: Sequence[str] = (), inputs: Iterable[str | Path] = ()
) -> None:
    """Raise InputError if an output file has none of the suffixes, or is an input under any name or link.

    None and - (standard output) are not checked.
    """
    if path is None or str(path) == "-":
        return
    for other in inputs:
        if os.path.exists(path) and os.path.exists(other) and os.path.samefile(other, path):
            raise InputError(f"{option} {path}: would replace {other}, which is an input; give another name")
    if suffixes and Path(path).suffix.lower() not in suffixes:
        raise InputError(f"{option} {path}: must end in {', '.join(suffixes)}".lstrip())
