"""Files that a crash cannot leave half written, JSON and settings in YAML."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from captioning.errors import InputError, one_line

FIGURES = (".png", ".pdf", ".svg")  # suffixes of the files that figures are written to


@contextmanager
def replacing(path: Path, option: str = "") -> Iterator[Path]:
    """Yield a temporary name beside ``path``, which is renamed to ``path`` when the block ends without an error.

    After an error or a crash the file is unchanged. Folders are made as needed. A link stays one: its target is
    replaced. Several processes may write the file at once; the last one wins. ``option`` is the option of the
    command line that named it, for the message.

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
    """Return the content of a JSON file; an InputError, with ``what_to_do``, if it cannot be read or is not JSON."""
    advice = f"; {what_to_do}" if what_to_do else ""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}){advice}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({one_line(error, 120)}){advice}") from error


def read_config(path: Path, option: str = "") -> dict[str, Any]:
    """Read a YAML file of settings, which ``option`` named, with jsonargparse's rules, by which 1e-3 is a number.

    An InputError says that it cannot be read, or is not a mapping of settings.
    """
    import yaml
    from jsonargparse import get_loader

    try:
        content = get_loader("yaml")(path.read_text(encoding="utf-8-sig")) or {}
        problem = "" if isinstance(content, dict) else "not a configuration, which is a mapping of settings"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except (ValueError, yaml.YAMLError) as error:
        problem = f"not a YAML file ({one_line(error, 120)})"
    if problem:
        raise InputError(f"{option} {path}: {problem}".lstrip())
    return content


def refuse_inputs(output: str | Path | None, inputs: Iterable[str | Path], option: str) -> None:
    """Refuse, by an InputError, an output that is one of the files that are read, by any name or link."""
    for path in inputs:
        if output is not None and os.path.exists(output) and os.path.exists(path) and os.path.samefile(path, output):
            raise InputError(f"{option} {output}: would replace {path}, which is an input; give another name")


def check_figure(path: str | Path | None, option: str = "") -> None:
    """Refuse, by an InputError, a file for a figure whose suffix is none of ``FIGURES``. None is no file."""
    if path is not None and Path(path).suffix.lower() not in FIGURES:
        raise InputError(f"{option} {path}: must end in {', '.join(FIGURES)}".lstrip())


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is the short text that a clone without git-LFS has in place of a large file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(40).startswith(b"version https://git-lfs.github.com/")
