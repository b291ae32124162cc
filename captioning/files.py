"""Reading and writing files: atomic writing, JSON, settings in YAML, and checks of output paths."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from captioning.errors import InputError, one_line, warn_once

FIGURES = (".png", ".pdf", ".svg")  # suffixes of the files that figures are written to
PAGES, JSON = (".html", ".htm"), (".json", ".jsonl")


@contextmanager
def replacing(path: Path, option: str = "") -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it to ``path`` when the block ends without an error.

    Make missing folders. Replace the target of a link. Raise InputError, which names ``option``, if the file cannot be
    written.
    """
    path = path.expanduser()
    path = path.resolve() if path.is_symlink() else path
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        elsewhere = error.filename is not None and Path(error.filename) not in (part, path, *path.parents)
        if elsewhere or isinstance(error, BrokenPipeError):  # an error of another file of the block
            raise
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
    """Return the content of a JSON file; raise InputError, which ends in ``what_to_do``, if it is not readable JSON."""
    advice = f"; {what_to_do}" if what_to_do else ""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}){advice}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({one_line(error, 120)}){advice}") from error


def read_config(path: Path, option: str = "") -> dict[str, Any]:
    """Return the settings in a YAML file; raise InputError, which names ``option``, if it is no valid mapping."""
    import yaml

    try:
        content = settings_loader()(path.read_text(encoding="utf-8-sig")) or {}
        problem = "" if isinstance(content, dict) else "not a configuration, which is a mapping of settings"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except InputError as error:
        problem = str(error)
    except (ValueError, yaml.YAMLError) as error:
        problem = f"not a YAML file ({one_line(error, 120)})"
    if problem:
        raise InputError(f"{option} {path}: {problem}".lstrip())
    return _with_named(content, path.parent)


def _with_named(settings: Any, folder: Path) -> Any:
    """Return settings in which the name of a YAML file, as in ``objective: mine.yaml``, is replaced by its content.

    The named file lies in ``folder``.
    """
    if isinstance(settings, dict):
        return {key: _with_named(value, folder) for key, value in settings.items()}
    return read_config(folder / settings) if str(settings).endswith((".yaml", ".yml")) else settings


@functools.cache
def settings_loader() -> Callable[[str], Any]:
    """Return the function that parses YAML settings, after telling jsonargparse to use it, too.

    It follows jsonargparse's rules, by which 1e-3 is a number, and expands ``~``. It raises InputError if a key stands
    twice, because PyYAML would silently take the last one.
    """
    import yaml
    from jsonargparse import get_loader, set_loader

    rules = get_loader("yaml")

    def load(text: str) -> Any:
        if twice := [*_twice(yaml.compose(text, yaml.SafeLoader), {})]:
            raise InputError("; ".join(twice))
        return _without_moved(map_strings(_expand_home, rules(text)))

    set_loader("yaml", load, (yaml.YAMLError,))
    return load


_MOVED = {  # settings of earlier versions: their defaults, and the options of today
    ("data", "test_split"): ("test", "captioning test --split"),
    ("model", "bound_samples"): (8, "captioning test --bound_samples"),
}


def _without_moved(settings: Any) -> Any:
    """Remove settings that are now options of a command, with a warning if they had another value than the default."""
    for (part, name), (default, option) in _MOVED.items():
        inside = settings.get(part) if isinstance(settings, dict) else None
        if isinstance(inside, dict) and inside.pop(name, default) != default:
            warn_once(f"{part}.{name} is ignored; it is an option now: {option}")
    return settings


def _twice(node: Any, lines: dict[str, int], prefix: str = "") -> Iterator[str]:
    """Yield a sentence on every setting that stands twice, as a key of its section or as one dotted key.

    ``lines`` has the lines of the settings so far, by dotted name.
    """
    children = getattr(node, "value", None)
    for number, child in enumerate(children if isinstance(children, list) else []):
        if not isinstance(child, tuple):  # an item of a list
            yield from _twice(child, lines, f"{prefix}{number}.")
            continue
        name, line = f"{prefix}{child[0].value}", child[0].start_mark.line + 1
        if name in lines:
            yield f"line {line}: {name} is there twice, first in line {lines[name]}"
        elif child[0].value != "<<":  # several merges lose nothing
            lines[name] = line
            yield from _twice(child[1], lines, f"{name}.")


def map_strings(function: Callable[[str], str], value: Any) -> Any:
    """Return plain data in which ``function`` has replaced every string."""
    if isinstance(value, dict):
        return {key: map_strings(function, inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(function, inner) for inner in value]
    return function(value) if isinstance(value, str) else value


def _expand_home(word: str) -> str:
    """Return a word with the home folder for ``~``; also in ``--option=~/x``, where the shell does not expand it."""
    option, sign, path = word.partition("=") if word.startswith("--") else ("", "", word)
    return option + sign + os.path.expanduser(path)


def command_line(args: Sequence[str] | None) -> list[str]:
    """Return the words of a command line, None for sys.argv's, with the home folder for ``~``."""
    return [_expand_home(word) for word in (sys.argv[1:] if args is None else args)]


def refuse_inputs(output: str | Path | None, inputs: Iterable[str | Path], option: str) -> None:
    """Raise InputError if the output is one of the input files, under any name or link."""
    for path in inputs:
        if output is not None and os.path.exists(output) and os.path.exists(path) and os.path.samefile(path, output):
            raise InputError(f"{option} {output}: would replace {path}, which is an input; give another name")


def check_suffix(path: str | Path, suffixes: Sequence[str] = FIGURES, option: str = "") -> None:
    """Raise InputError if an output file has none of the suffixes."""
    if Path(path).suffix.lower() not in suffixes:
        raise InputError(f"{option} {path}: must end in {', '.join(suffixes)}".lstrip())


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is a git-LFS pointer, the short text that a clone without git-LFS gets."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(40).startswith(b"version https://git-lfs.github.com/")
