"""Values from files that the user did not name: plain data, and known components where the type of a place takes them.

jsonargparse imports the class that a text names, and reads the file that it names, wherever a type is or contains a
class. So every value is checked against the type of its place, by an allow-list: a place of a plain type takes any
text, and a place of any other type takes known components, numbers and, where it takes texts too, single words.
"""

from __future__ import annotations

import collections.abc
import datetime
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from captioning.component import Component, known_class, own_argument_types, public_path, subclasses
from captioning.errors import InputError
from captioning.settings import load_yaml

_ANYTHING = frozenset({Any, object})
_PLAIN = frozenset(
    {str, int, float, bool, complex, bytes, list, dict, tuple, set, frozenset, Path, type(None), type(Ellipsis)}
    | {datetime.timedelta, collections.abc.Sequence, collections.abc.Mapping, collections.abc.Iterable}
)
_UNKNOWN = str | type  # of an argument whose type cannot be read
_WORD = re.compile(r"\.?[\w:,=# -]*")


def checked_component(value: Any, kind: type, place: str) -> dict[str, Any]:
    """Return a ``class_path`` with ``init_args`` in which jsonargparse finds nothing to run but known classes.

    Args:
        kind: Class that must be the value's base; classes in its arguments may also be any ``Component``.
        place: Its place in the configuration, for messages.

    Raises:
        InputError: A class is unknown or of another kind, or a value is neither plain data nor a class.
    """
    value = {"class_path": value} if isinstance(value, str) else value
    if not isinstance(value, Mapping) or not isinstance(value.get("class_path"), str):
        raise InputError(f"{place}: not a class_path with init_args")
    if unknown := set(value) - {"class_path", "init_args", "dict_kwargs"}:
        raise InputError(f"{place}: has {min(map(str, unknown))!r} beside class_path and init_args")
    cls = _known(value["class_path"], kind, place)
    groups = {
        group: checked_arguments(value[group], cls, place, kind)
        for group in ("init_args", "dict_kwargs")
        if value.get(group)
    }
    return {"class_path": public_path(cls), **groups}


def checked_part(value: Any, kind: type, place: str) -> Any:
    """Return a component as ``checked_component`` does, or arguments alone, which a later configuration may change.

    Raises:
        InputError: For the reasons of ``checked_component``.
    """
    return _checked(value, kind, kind, place)


def checked_arguments(value: Any, cls: type, place: str, kind: type | None = None) -> dict[str, Any]:
    """Return the arguments of a class, each checked against its type.

    Args:
        kind: Class whose subclasses may stand in an argument, besides every ``Component``; None for none at all.

    Raises:
        InputError: An argument names code or another file, or is no plain data.
    """
    if not isinstance(value, Mapping):
        raise InputError(f"{place}: the arguments are no mapping")
    types = argument_types(cls)
    return {
        _key(name, place): _checked(argument, types.get(name, _UNKNOWN), kind, f"{place}.{name}")
        for name, argument in value.items()
    }


def checked_plain(value: Any, place: str, hint: Any = Any) -> Any:
    """Return numbers, texts, lists and mappings of them as they are.

    Args:
        hint: Type of the place.

    Raises:
        InputError: The value is or contains anything else.
    """
    return _checked(value, hint, None, place)


def is_word(text: str) -> bool:
    """Return whether a text is a word such as "16-mixed", ".3f" or "#6206E0", which names neither code nor a file."""
    return _WORD.fullmatch(text) is not None and not os.path.isfile(text)


def _known(path: str, kind: type, place: str) -> type:
    try:
        return known_class(path, kind)
    except InputError as error:
        try:
            return known_class(path, Component)
        except InputError:
            raise InputError(f"{place}: {error}") from None


def _key(name: Any, place: str) -> str:
    if not isinstance(name, str) or "." in name:  # jsonargparse reads "encoder.class_path" as two levels
        raise InputError(f"{place}: {name!r} is not a name")
    return name


def _checked(value: Any, hint: Any, kind: type | None, place: str) -> Any:
    if isinstance(value, Mapping):
        if "class_path" in value:
            if kind is None:
                raise InputError(f"{place}: {value['class_path']} is a class where plain values are expected")
            return checked_component(value, kind, place)
        types = _types_inside(hint)
        return {
            _key(name, place): _checked(inner, types.get(name, hint), kind, f"{place}.{name}")
            for name, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_checked(inner, hint, kind, place) for inner in value]
    if isinstance(value, str):
        return _checked_text(value, hint, kind, place)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise InputError(f"{place}: {type(value).__name__} where plain values are expected")


def _checked_text(text: str, hint: Any, kind: type | None, place: str) -> Any:
    try:
        inside = load_yaml(text)
    except yaml.YAMLError:
        inside = text  # a text that is no YAML stays one
    if isinstance(inside, (Mapping, list)) and _names_class(inside):
        raise InputError(f"{place}: holds a class_path in a text")
    leaves = set(_leaves(hint))
    if leaves <= _PLAIN | _ANYTHING or inside is None or isinstance(inside, (bool, int, float)):
        return text
    if str in leaves and is_word(text):
        return text
    if kind is None:
        raise InputError(f"{place}: {text} names code or a file where plain values are expected")
    return checked_component(text, kind, place)


def _names_class(value: Any) -> bool:
    if isinstance(value, str):
        return "class_path" in value
    if isinstance(value, Mapping):
        return "class_path" in value or any(map(_names_class, value.values()))
    return isinstance(value, list) and any(map(_names_class, value))


def argument_types(cls: type) -> dict[str, Any]:
    """Return the types of a constructor's arguments, those that it passes on included; ``_UNKNOWN`` if unreadable."""
    return {name: hint for base in reversed(cls.__mro__) for name, hint in _types_of_its_own(base).items()}


def _types_of_its_own(cls: type) -> dict[str, Any]:
    known = own_argument_types(cls)
    if known is None:
        return dict.fromkeys(inspect.signature(cls.__init__).parameters, _UNKNOWN)  # type: ignore[misc]
    return known


def _types_inside(hint: Any) -> dict[str, list[Any]]:
    """Return the types of the arguments that a mapping at a place of this type may be, those of all classes."""
    types: dict[str, list[Any]] = {}
    for leaf in set(_leaves(hint)) - _PLAIN - _ANYTHING - {type}:
        for cls in subclasses(leaf):
            for name, inner in argument_types(cls).items():
                types.setdefault(name, []).append(inner)
    return types


def _leaves(hint: Any) -> Iterator[Any]:
    """Yield the types inside a type or a list; ``type`` stands for all that is called or imported by its name."""
    origin = get_origin(hint)
    if isinstance(hint, list):
        for inner in hint:
            yield from _leaves(inner)
    elif origin is Literal:
        yield str
    elif origin in (collections.abc.Callable, type):
        yield type
    elif get_args(hint):
        for inner in get_args(hint):
            yield from _leaves(inner)
    else:
        yield hint if hint is Any or (isinstance(hint, type) and hint is not collections.abc.Callable) else type
