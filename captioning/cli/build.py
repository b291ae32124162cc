"""Objects that parts of a training configuration describe."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from argparse import ArgumentError
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_loader

from captioning.cli.allowed_values import argument_types, checked_part
from captioning.cli.checks import REFUSALS, refusal
from captioning.component import import_modules
from captioning.errors import InputError
from captioning.settings import load_yaml, read_config

CONFIG_FORMAT = "captioning"
"""Parser mode of jsonargparse by which configurations are read."""
set_loader(CONFIG_FORMAT, load_yaml, (yaml.YAMLError,))  # a text that is no YAML, such as {epoch}-{step}, stays one


def build(kinds: Mapping[str, type], configs: Iterable[Mapping[str, Any]], options: Sequence[str] = ()) -> list[Any]:
    """Build the named parts of a training configuration, and ignore its other settings.

    Only classes of this package, or of modules that the caller has imported, are constructed: a configuration cannot
    choose code to run.

    Args:
        kinds: Class of each part by its place in the configuration, such as ``{"data.source": CaptionSource}``.
        configs: Configurations, merged in order as on the training command line; later ones win.
        options: Options of the training command, ``["--data.source.root", "DIR"]``. They win over the configurations.

    Raises:
        InputError: A part is missing or of another kind, or its arguments do not fit.
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
    except (ArgumentError, OverflowError, yaml.YAMLError) as error:
        given = f" (given: {' '.join(options)})" if options else ""
        raise InputError(" ".join(str(error).split()) + given) from error
    for place in kinds:
        refuse_nulls(settings[place], place)
    try:
        built = parser.instantiate(settings)
    except InputError:
        raise
    except REFUSALS as error:
        raise refusal(error) from error
    return [built[place] for place in kinds]


def build_parts(
    kinds: Mapping[str, type],
    files: Sequence[Path],
    imports: Sequence[str],
    options: Sequence[str],
    *,
    optional: Mapping[str, type] | None = None,
) -> list[Any]:
    """``build`` from what ``arguments.config_parser`` read.

    Args:
        imports: Modules to import, from the working directory or the first file's folder.
        optional: Further parts; None is returned for one that no file and no option names.

    Raises:
        InputError: No file is given, or for the reasons of ``build``.
    """
    if not files:
        raise InputError("--config: name the training YAML")
    import_modules(imports, [Path(), files[0].parent])
    configs = [read_config(path, "--config") for path in files]
    named = {
        place: kind
        for place, kind in (optional or {}).items()
        if any(option.startswith(f"--{place}") for option in options)
        or any(_parts(config, {place: kind}) for config in configs)
    }
    built = dict(zip([*kinds, *named], build({**kinds, **named}, configs, options), strict=True))
    return [built.get(place) for place in [*kinds, *(optional or {})]]


def _parts(config: Mapping[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the parts that a configuration has, by their places."""
    parts = {}
    for place, kind in kinds.items():
        value: Any = config
        for name in place.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            parts[place] = checked_part(value, kind, place)
    return parts


def refuse_nulls(value: Any, place: str) -> None:
    """Refuse null for a class's argument that does not take it, which jsonargparse lets pass.

    Args:
        value: A class_path with init_args as jsonargparse parsed it. Anything else passes.
        place: Its place in the configuration, for messages.

    Raises:
        InputError: Names the argument.
    """
    if isinstance(value, list):
        for item in value:
            refuse_nulls(item, place)
    value = value.as_dict() if isinstance(value, Namespace) else value
    path = value.get("class_path") if isinstance(value, dict) else None
    if not isinstance(path, str):
        return
    module, _, name = path.rpartition(".")
    cls = getattr(sys.modules.get(module), name, None)
    if isinstance(cls, type):
        refuse_null_arguments(cls, value.get("init_args") or {}, f"{place}.init_args")


def refuse_null_arguments(cls: type, arguments: Mapping[str, Any], place: str) -> None:
    """Refuse null for the arguments of one class, as ``refuse_nulls`` does.

    Raises:
        InputError: Names the argument.
    """
    types, parameters = argument_types(cls), inspect.signature(cls.__init__).parameters  # type: ignore[misc] # a metaclass hides them
    for name, value in arguments.items():
        hint, parameter = types.get(name, Any), parameters.get(name)
        has_default = parameter is not None and parameter.default is not None
        if value is None and has_default and not _takes_null(hint):
            raise InputError(f"{place}.{name}: must not be null; give a value, or leave it out for its default")
        if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
            refuse_null_arguments(hint, value, f"{place}.{name}")  # type: ignore[arg-type] # a class, no object
        else:
            refuse_nulls(value, f"{place}.{name}")


def _takes_null(hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return None in get_args(hint)
    return hint in (Any, object, None, type(None)) or isinstance(hint, TypeVar) or any(map(_takes_null, get_args(hint)))
