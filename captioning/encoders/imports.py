"""Imports torchvision and timm without modules that no encoder uses: 5 of the 8 seconds to caption one image.

torchvision and timm import ``torch._dynamo``, the compiler behind ``torch.compile``, for a function and a decorator
that no encoder calls; importing it takes longer than torch itself. timm also imports wandb in case it should log.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_FILLING = frozenset(
    {torch.Tensor.normal_, torch.Tensor.uniform_}
    | {function for name, function in vars(torch.nn.init).items() if name.endswith("_") and callable(function)}
)
_COMPILER = ("torch._dynamo", "torch._dynamo.utils")


@contextmanager
def lean_imports() -> Iterator[None]:
    """Within this, ``torch._dynamo`` is imported only when it is used, and wandb cannot be imported.

    Modules that were imported before stay as they are. Afterwards everything can be imported as usual, but timm does
    without wandb.
    """
    with _compiler_when_called(), _without("wandb"):
        yield


class LeaveUnfilled(TorchFunctionMode):
    """Within this, tensors are not initialised: random numbers on the meta device would import ``torch._dynamo``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FILLING:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def _without(name: str) -> Iterator[None]:
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment] # makes an import fail
    try:
        yield
    finally:
        del sys.modules[name]


@contextmanager
def _compiler_when_called() -> Iterator[None]:
    if _COMPILER[0] in sys.modules:
        yield
        return
    disable = torch.compiler.disable
    for name in _COMPILER:
        sys.modules[name] = _Placeholder(name)
    torch.compiler.disable = _disabled_when_compiling  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compiler.disable = disable
        _remove_placeholders()


class _Placeholder(ModuleType):
    """Stands in ``sys.modules`` for a module of the compiler, which it imports for any attribute but one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks for the kind of module
            raise AttributeError(name)
        if name == "is_compile_supported":
            return _is_compile_supported
        _remove_placeholders()
        return getattr(importlib.import_module(self.__name__), name)


def _remove_placeholders() -> None:
    for name in _COMPILER:
        if isinstance(sys.modules.get(name), _Placeholder):
            del sys.modules[name]


def _is_compile_supported(device: str) -> bool:
    return bool(importlib.import_module("torch._dynamo.utils").is_compile_supported(device))


def _disabled_when_compiling(
    function: Callable[..., Any] | None = None, recursive: bool = True, **options: Any
) -> Callable[..., Any]:
    """``torch.compiler.disable``, but put off until the compiler is imported."""
    if function is None:
        return lambda function: _disabled_when_compiling(function, recursive, **options)

    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER[0] not in sys.modules:  # so nothing is compiled
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function, recursive, **options))
        return disabled[0](*args, **kwargs)

    return call
