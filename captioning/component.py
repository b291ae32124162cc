"""Modules that record their constructor arguments, so that a checkpoint can rebuild them from plain data.

A component's constructor takes hyper-parameters and other components. Sizes that another component determines (the
encoder's D, the vocabulary's V) are arguments of ``build``, which the captioner calls.
"""

import contextlib
import importlib
import inspect
from abc import ABCMeta
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor, nn
from typing_extensions import Self

from captioning import earlier_names
from captioning.errors import InputError

T = TypeVar("T")


def check_shape(owner: object, value_name: str, value: Any, *shape: int) -> None:
    """Raise InputError if a user's class returned another shape; ``value_name`` is like "logits (B, R, L)"."""
    if getattr(value, "shape", None) != shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{type(owner).__name__}: {value_name} must have the shape {shape}, got {got}")


class _RecordsInitArgs(ABCMeta):
    """Stores the arguments of the constructor call on the instance."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        component = super().__call__(*args, **kwargs)
        bound = inspect.signature(cls.__init__).bind(component, *args, **kwargs)  # type: ignore[misc]
        bound.apply_defaults()
        component._init_args = arguments = dict(list(bound.arguments.items())[1:])
        for parameter in bound.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments |= arguments.pop(parameter.name)
        return component


class Component(nn.Module, metaclass=_RecordsInitArgs):
    """A module whose constructor arguments are plain data or other components."""

    _init_args: dict[str, Any]
    is_built = False  # whether a captioner has built it and owns it

    def __init__(self) -> None:  # nn.Module's takes anything
        super().__init__()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in [name for name in state_dict if name.startswith(prefix)]:
            first, dot, rest = name.removeprefix(prefix).partition(".")
            if first in earlier_names.MODEL and not hasattr(self, first):
                value = state_dict.pop(name)
                if earlier_names.MODEL[first]:
                    state_dict[f"{prefix}{earlier_names.MODEL[first]}{dot}{rest}"] = value
        super()._load_from_state_dict(state_dict, prefix, *args)

    def to_config(self) -> dict[str, Any]:
        """Return ``{"class_path": str, "init_args": {...}}`` of plain data, the form of the YAML files."""
        try:
            init_args = {name: _plain(value) for name, value in self._init_args.items()}
        except TypeError as error:
            raise InputError(f"{type(self).__name__}: {error}") from error
        return {"class_path": public_path(type(self)), "init_args": init_args}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Rebuild the component that ``to_config`` described.

        A file cannot choose which code runs: it can name only subclasses of ``cls`` that this package has or the caller
        has imported. Raises InputError for another class, or arguments that do not fit.
        """
        component_class = known_class(config["class_path"], cls)
        accepted = inspect.signature(component_class.__init__).parameters
        # A user's class may call an argument by one of our earlier names.
        names = earlier_names.MODEL | {name: name for name in accepted}
        arguments = ((names.get(name) or name, value) for name, value in config["init_args"].items())
        # A file may have a removed option as null.
        init_args = {name: _revive(value) for name, value in arguments if name in accepted or value is not None}
        try:
            return component_class(**init_args)
        except TypeError as error:
            raise InputError(f"{config['class_path']}: {error}") from error


def public_path(cls: type) -> str:
    """Return the path of a class in the outermost package that exports it: captioning.attention.SoftAttention.

    YAML files, checkpoints and docs name a class by this path, not by the file that defines it.
    """
    names = cls.__module__.split(".")
    for length in range(1, len(names)):
        package = ".".join(names[:length])
        if getattr(importlib.import_module(package), cls.__qualname__, None) is cls:
            return f"{package}.{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def known_class(path: str, base: type[T]) -> type[T]:
    """Return the subclass of ``base`` that a file names. Raises InputError if it is neither ours nor imported."""
    module = path.rpartition(".")[0]
    remedy = "import the module that defines it first (--import)"
    if module.split(".")[0] == __package__:
        remedy = "this version of captioning has no such class"
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    for cls in _subclasses(base):
        if path in (public_path(cls), f"{cls.__module__}.{cls.__qualname__}", cls.__qualname__):
            return cls
    raise InputError(f"{path} is not a known {base.__name__}; {remedy}")


def _subclasses(cls: type[T]) -> Iterator[type[T]]:
    """Yield a class and its imported subclasses at any depth."""
    yield cls
    for child in cls.__subclasses__():
        yield from _subclasses(child)


def _plain(value: Any) -> Any:
    if isinstance(value, Component):
        return value.to_config()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"its arguments must be plain data or components, got {type(value).__name__}")


def _revive(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"class_path", "init_args"}:
        return Component.from_config(value)
    if isinstance(value, dict):
        return {key: _revive(item) for key, item in value.items()}
    return [_revive(item) for item in value] if isinstance(value, list) else value
