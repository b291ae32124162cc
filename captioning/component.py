"""Modules that remember how they were built, so that a checkpoint can rebuild them from plain data.

A component's constructor takes hyper-parameters and other components. Sizes that a neighbour fixes (the encoder's D,
the vocabulary's V) are not among them: the owner passes those to ``build`` when the model is assembled.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABCMeta
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from captioning.errors import InputError

C = TypeVar("C", bound="Component")


class _RecordsInitArgs(ABCMeta):
    """Stores the arguments of the outermost constructor call on the instance, whatever the class."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        component = super().__call__(*args, **kwargs)
        bound = inspect.signature(cls.__init__).bind(component, *args, **kwargs)  # type: ignore[misc]
        bound.apply_defaults()
        component._init_args = dict(list(bound.arguments.items())[1:])
        return component


class Component(nn.Module, metaclass=_RecordsInitArgs):
    """A module whose constructor arguments are plain data or other components."""

    _init_args: dict[str, Any]

    def __init__(self) -> None:  # nn.Module's takes anything
        super().__init__()

    def to_config(self) -> dict[str, Any]:
        """Return ``{"class_path": str, "init_args": {...}}`` of plain data, the shape the YAML files use."""
        cls = type(self)
        init_args = {name: _plain(value) for name, value in self._init_args.items()}
        return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": init_args}

    @classmethod
    def from_config(cls: type[C], config: dict[str, Any]) -> C:
        """Rebuild what ``to_config`` described.

        Runs no code that the file chooses: only subclasses of ``cls`` that live in this package, or that the caller
        has imported already, are constructed.

        Raises:
            InputError: the class is unknown, of another kind, or its arguments do not fit.
        """
        path = config["class_path"]
        module = path.rpartition(".")[0]
        if module.split(".")[0] == "captioning":
            importlib.import_module(module)
        found = next((c for c in _subclasses(cls) if f"{c.__module__}.{c.__qualname__}" == path), None)
        if found is None:
            raise InputError(f"{path} is not a known {cls.__name__}; import the module that defines it first")
        init_args = {name: _revive(value) for name, value in config["init_args"].items()}
        try:
            component = found(**init_args)
        except TypeError as error:
            raise InputError(f"{path}: {error}") from error
        return component


def _plain(value: Any) -> Any:
    if isinstance(value, Component):
        return value.to_config()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    raise TypeError(f"a component's arguments must be plain data or components, got {type(value).__name__}")


def _revive(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"class_path", "init_args"}:
        return Component.from_config(value)
    if isinstance(value, list):
        return [_revive(item) for item in value]
    return value


def _subclasses(cls: type[C]) -> Iterator[type[C]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _subclasses(child)
