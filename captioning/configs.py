"""Training configurations as jsonargparse reads them, and the objects that parts of one describe."""

from __future__ import annotations

import json
from argparse import ArgumentError
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, get_loader, set_loader

from captioning.component import Component, current_path, known_class
from captioning.errors import InputError


def load_config(text: str) -> Any:
    """Read a config or an option's value as jsonargparse does; classes by their earlier paths are found."""
    return _with_current_paths(get_loader("yaml")(text))


def _with_current_paths(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_current_paths(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _with_current_paths(item) for key, item in value.items()}
    if isinstance(found.get("class_path"), str):
        found["class_path"] = current_path(found["class_path"])
    return found


CONFIG_FORMAT = "captioning"
set_loader(CONFIG_FORMAT, load_config)


def read_config(path: Path, option: str = "") -> dict[str, Any]:
    """Read a YAML file of settings.

    Args:
        option: of the command line that named the file.

    Raises:
        InputError: the file cannot be read or holds something else.
    """
    named = f"{option} {path}".lstrip()
    try:
        content = load_config(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise InputError(f"{named}: cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{named}: not a YAML file ({' '.join(str(error).split())[:120]})") from error
    if not isinstance(content, dict):
        raise InputError(f"{named}: not a configuration, which is a mapping of settings")
    return content


def build(kinds: Mapping[str, type], configs: Iterable[Mapping[str, Any]], options: Sequence[str] = ()) -> list[Any]:
    """Build the parts of a training configuration that are asked for; its other settings are ignored.

    Runs no code that a configuration chooses: only classes that live in this package, or that the caller has imported
    already, are constructed.

    Args:
        kinds: class of each part by its place in the configuration, such as ``{"data.source": CaptionSource}``.
        configs: merged in order as on the training command line, later ones win.
        options: in the training command's words, ``["--data.source.root", "DIR"]``; they win over the configurations.

    Raises:
        InputError: a part is missing, of another kind, or its arguments do not fit.
    """
    parser = ArgumentParser(parser_mode=CONFIG_FORMAT, exit_on_error=False)
    parser.add_argument("--config", action=ActionConfigFile)
    for place, kind in kinds.items():
        parser.add_argument(f"--{place}", type=kind, required=True)
    arguments = []
    for config in configs:
        arguments += ["--config", json.dumps(_parts(config, kinds), default=str)]
    try:
        settings = parser.parse_args([*arguments, *options])
    except ArgumentError as error:
        given = f" (given: {' '.join(options)})" if options else ""
        raise InputError(" ".join(str(error).split()) + given) from error
    built = parser.instantiate(settings)
    return [built[place] for place in kinds]


def _parts(config: Mapping[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the parts that are there, by their places."""
    found = {}
    for place, kind in kinds.items():
        group, name = place.split(".")
        inside = config.get(group)
        part = inside.get(name) if isinstance(inside, Mapping) else None
        if part is not None:
            _refuse_unknown_classes(part, kind)
            found[place] = part
    return found


def _refuse_unknown_classes(value: Any, kind: type) -> None:
    """Look at all levels: jsonargparse constructs what it finds in an argument of any type."""
    path = value.get("class_path") if isinstance(value, Mapping) else value
    if isinstance(path, str):
        known_class(path, kind)
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        if isinstance(inner, (Mapping, list)):
            _refuse_unknown_classes(inner, Component)
