"""Training configurations as jsonargparse reads them, and the objects that parts of one describe."""

from __future__ import annotations

import collections.abc
import inspect
import json
import re
import sys
from argparse import ArgumentError
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, get_loader, set_loader

from captioning.component import Component, import_modules, known_class, public_path
from captioning.errors import InputError, one_line

_MAX_NODES, _MAX_DEPTH = 100_000, 100


def load_config(text: str) -> Any:
    """Read a config or an option's value as jsonargparse does, but refuse what would take too long.

    Raises:
        YAMLError: it is no YAML, is nested too deeply, or its aliases stand for too many values.
    """
    try:
        if len(text) > _MAX_DEPTH:
            _refuse_deep(text)
        if "&" in text and "*" in text:
            _count_nodes(yaml.compose(text, Loader=yaml.SafeLoader), {})
        return get_loader("yaml")(text)
    except RecursionError as error:  # a short text in an option
        raise yaml.YAMLError("nested too deeply") from error
    except (ValueError, OverflowError) as error:  # such as a date that there is not
        raise yaml.YAMLError(one_line(error)) from error


def _refuse_deep(text: str) -> None:
    """Look at the events alone, which takes no recursion: the parser in C ends the process where its stack ends."""
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
    except (ValueError, OverflowError, yaml.YAMLError) as error:  # ValueError: no UTF-8, no such date ..
        raise InputError(f"{named}: not a YAML file ({one_line(error, 120)})") from error
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
    except (ArgumentError, yaml.YAMLError) as error:
        given = f" (given: {' '.join(options)})" if options else ""
        raise InputError(" ".join(str(error).split()) + given) from error
    for place in kinds:
        refuse_nulls(settings[place], place)
    built = parser.instantiate(settings)
    return [built[place] for place in kinds]


def refuse_nulls(value: Any, place: str) -> None:
    """Refuse null for an argument of a class that takes none, which jsonargparse lets pass.

    Args:
        value: a class_path with init_args, as jsonargparse parsed it, or anything else, which passes.
        place: in the configuration, for messages.

    Raises:
        InputError: names the argument.
    """
    if isinstance(value, list):
        for item in value:
            refuse_nulls(item, place)
    value = value.as_dict() if isinstance(value, Namespace) else value
    path = value.get("class_path") if isinstance(value, dict) else None
    if not isinstance(path, str):
        return
    module, _, name = path.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    arguments = value.get("init_args") or {}
    if isinstance(found, type):
        refuse_null_arguments(found, arguments, f"{place}.init_args")


def refuse_null_arguments(cls: type, arguments: Mapping[str, Any], place: str) -> None:
    """``refuse_nulls`` of the arguments of one class.

    Raises:
        InputError: names the argument.
    """
    hints, parameters = _hints(cls), inspect.signature(cls).parameters
    for name, value in arguments.items():
        known = parameters.get(name)
        if value is None and known is not None and known.default is not None and not _takes_null(hints.get(name, Any)):
            raise InputError(f"{place}.{name}: must not be null; give a value, or leave it out for its default")
        refuse_nulls(value, f"{place}.{name}")


def _takes_null(hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return None in get_args(hint)
    return hint in (Any, object, None, type(None)) or isinstance(hint, TypeVar) or any(map(_takes_null, get_args(hint)))


def build_parts(
    kinds: Mapping[str, type],
    files: Sequence[Path],
    imports: Sequence[str],
    options: Sequence[str],
    *,
    optional: Mapping[str, type] | None = None,
) -> list[Any]:
    """``build`` from what ``terminal.config_parser`` read; ``imports`` are looked for here, then beside the first file.

    Args:
        optional: further parts; None where no file and no option names one.

    Raises:
        InputError: no file is given, or one of the reasons of ``build``.
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
    """Return the parts that are there, by their places."""
    found = {}
    for place, kind in kinds.items():
        group, name = place.split(".")
        inside = config.get(group)
        part = inside.get(name) if isinstance(inside, Mapping) else None
        if part is not None:  # a later configuration may change arguments alone, without a class of its own
            found[place] = (
                checked_component(part, kind, place) if isinstance(part, str) else _checked(part, str, kind, place)
            )
    return found


# What a file may say that the user did not name


def checked_component(value: Any, kind: type, place: str) -> dict[str, Any]:
    """Return a ``class_path`` with ``init_args`` in which jsonargparse finds nothing to run but known classes.

    All levels are looked at, because jsonargparse constructs what it finds in an argument of any type, also in a
    string, and imports the module of what a string names where it expects a class.

    Args:
        kind: which the class must be; those in its arguments may also be any ``Component``.
        place: in the configuration, for messages.

    Raises:
        InputError: a class is unknown or of another kind, or the value is something else than plain data and classes.
    """
    value = {"class_path": value} if isinstance(value, str) else value
    if not isinstance(value, Mapping) or not isinstance(value.get("class_path"), str):
        raise InputError(f"{place}: not a class_path with init_args")
    if unknown := set(value) - {"class_path", "init_args", "dict_kwargs"}:
        raise InputError(f"{place}: has {min(map(str, unknown))!r} beside class_path and init_args")
    found = _known(value["class_path"], kind, place)
    hints = _hints(found)
    checked: dict[str, Any] = {"class_path": public_path(found)}
    for group in ("init_args", "dict_kwargs"):
        if arguments := value.get(group):
            if not isinstance(arguments, Mapping):
                raise InputError(f"{place}: its {group} are no mapping")
            checked[group] = {
                _key(name, place): _checked(argument, hints.get(name, Any), kind, f"{place}.{name}")
                for name, argument in arguments.items()
            }
    return checked


def checked_plain(value: Any, place: str) -> Any:
    """Return numbers, texts, lists and mappings of them as they are.

    Raises:
        InputError: there is a class, or anything else, in them.
    """
    return _checked(value, Any, None, place)


def _known(path: str, kind: type, place: str) -> type:
    try:
        return known_class(path, kind)
    except InputError as error:
        try:
            return known_class(path, Component)
        except InputError:
            raise InputError(f"{place}: {error}") from None


def _key(name: Any, place: str) -> str:
    if not isinstance(name, str) or "." in name:  # jsonargparse reads "encoder.class_path" as a level of its own
        raise InputError(f"{place}: {name!r} is not a name")
    return name


def _checked(value: Any, hint: Any, kind: type | None, place: str) -> Any:
    if isinstance(value, Mapping):
        if "class_path" not in value:
            return {_key(name, place): _checked(inner, Any, kind, f"{place}.{name}") for name, inner in value.items()}
        if kind is None:
            raise InputError(f"{place}: {value['class_path']} is a class where plain values are expected")
        return checked_component(value, kind, place)
    if isinstance(value, (list, tuple)):
        return [_checked(inner, hint, kind, place) for inner in value]
    if isinstance(value, str):
        return _checked_text(value, hint, kind, place)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise InputError(f"{place}: {type(value).__name__} where plain values are expected")


_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_PLAIN = (str, int, float, bool, complex, bytes, list, dict, tuple, set, frozenset, Path, type(None), type(Ellipsis))


def _checked_text(text: str, hint: Any, kind: type | None, place: str) -> Any:
    try:
        inside = load_config(text)
    except yaml.YAMLError:
        inside = None  # a text that is no YAML stays one
    if isinstance(inside, (Mapping, list)) and _names_class(inside):
        raise InputError(f"{place}: holds a class_path in a text")
    leaves = set(_leaves(hint))
    if all(leaf is Any or leaf in _PLAIN or not isinstance(leaf, type) for leaf in leaves):
        return text
    if isinstance(inside, (bool, int, float)) or (str in leaves and not _DOTTED.fullmatch(text)):
        return text
    if kind is None:
        raise InputError(f"{place}: {text} names code where plain values are expected")
    return checked_component(text, kind, place)


def _names_class(value: Any) -> bool:
    if isinstance(value, str):
        return "class_path" in value
    if isinstance(value, Mapping):
        return "class_path" in value or any(map(_names_class, value.values()))
    return isinstance(value, list) and any(map(_names_class, value))


def _hints(cls: type) -> dict[str, Any]:
    """Return the types of the constructor's arguments; ``type`` for all where they cannot be read."""
    try:
        return get_type_hints(cls.__init__)  # type: ignore[misc]
    except (NameError, TypeError, AttributeError):  # of a name that only a type checker imports
        return dict.fromkeys(inspect.signature(cls).parameters, str | type)


def _leaves(hint: Any) -> Iterator[Any]:
    """Yield the types in a type; ``type`` stands for whatever is called or imported by its name."""
    origin = get_origin(hint)
    if origin is Literal:
        yield str
    elif origin in (collections.abc.Callable, type):
        yield type
    elif get_args(hint):
        for inner in get_args(hint):
            yield from _leaves(inner)
    else:
        yield type if hint is collections.abc.Callable else hint
