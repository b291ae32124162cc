"""YAML files of settings, read such that a hostile file costs no more than a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from captioning.errors import InputError, one_line
from captioning.files import read_bytes

_MAX_NODES, _MAX_DEPTH = 100_000, 100


def read_config(path: Path, option: str = "") -> dict[str, Any]:
    """Read a file of settings.

    Args:
        option: Option of the command line that named the file.

    Raises:
        InputError: The file cannot be read, or is not a mapping of settings.
    """
    named = f"{option} {path}".lstrip()
    try:
        content = load_yaml(read_bytes(path).decode("utf-8")) or {}
    except OSError as error:
        raise InputError(f"{named}: cannot be read ({error.strerror})") from error
    except (ValueError, OverflowError, yaml.YAMLError) as error:  # ValueError: no UTF-8, no such date ..
        raise InputError(f"{named}: not a YAML file ({one_line(error, 120)})") from error
    if not isinstance(content, dict):
        raise InputError(f"{named}: not a configuration, which is a mapping of settings")
    return content


def load_yaml(text: str) -> Any:
    """Parse YAML with jsonargparse's rules, by which 1e-3 is a number.

    Raises:
        YAMLError: The text is not YAML, is nested too deeply, or its aliases stand for too many values.
    """
    try:
        if len(text) > _MAX_DEPTH:
            _refuse_deep(text)
        if "&" in text and "*" in text:
            _count_nodes(yaml.compose(text, Loader=yaml.SafeLoader), {})
        return get_loader("yaml")(text)
    except RecursionError as error:  # a short text in an option
        raise yaml.YAMLError("nested too deeply") from error
    except (ValueError, OverflowError) as error:  # such as 30 February
        raise yaml.YAMLError(one_line(error)) from error
    except (TypeError, LookupError, AttributeError) as error:  # PyYAML does not check a value before it reads it
        raise yaml.YAMLError("a value does not fit its tag") from error


def _refuse_deep(text: str) -> None:
    """Look at the events alone, which needs no recursion: the parser in C would overflow its stack and crash."""
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise yaml.YAMLError("nested too deeply")


def _count_nodes(node: yaml.Node | None, counts: dict[int, int]) -> int:
    """Return how many values a node stands for with its aliases written out; each node is counted once."""
    if id(node) not in counts:
        counts[id(node)] = _MAX_NODES + 1  # of a node inside itself
        inside = node.value if isinstance(node, yaml.CollectionNode) else []
        children = [child for item in inside for child in (item if isinstance(item, tuple) else (item,))]
        counts[id(node)] = 1 + sum(_count_nodes(child, counts) for child in children)
    if counts[id(node)] > _MAX_NODES:
        raise yaml.YAMLError(f"its aliases stand for more than {_MAX_NODES:,} values")
    return counts[id(node)]
