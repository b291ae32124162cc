"""Compiles and calls ``additive.c``: the additive score on the CPU, several times faster than PyTorch's operations.

The library is compiled once per machine with the C compiler (``CC``, or ``cc``) and kept in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_name("additive.c")
# fast-math: the sums may be added up in any order, which is what lets them be vectorised.
_FLAGS = "-O3 -march=native -ffast-math -funroll-loops -shared -fPIC".split()
_WIDE = "-mprefer-vector-width=512"
_TYPES = (torch.float32, torch.bfloat16)

_log = logging.getLogger(__name__)


_Pointer = ctypes.c_void_p


class _Pool(ctypes.Structure):
    _fields_ = (("parallel", _Pointer), ("thread", _Pointer), ("threads", ctypes.c_long))


def usable(projected: Tensor) -> bool:
    """Return whether the kernels can take ``projected`` (B, L, A)."""
    return projected.device.type == "cpu" and projected.dtype in _TYPES and _library() is not None


def forward(projected: Tensor, query: Tensor, weight: Tensor) -> Tensor:
    """Return e (B, R, L) float32 of P (B, L, A), q (B, R, A) and v (A,), all contiguous; q and v float32."""
    B, L, A = projected.shape
    R = query.shape[1]
    logits = torch.empty(B, R, L)
    library = _library()
    assert library is not None
    library.additive_forward(_pool(), _is_bfloat16(projected), *_at(projected, query, weight, logits), B, R, L, A)
    return logits


def backward(projected: Tensor, query: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of q (B, R, A) and v (A,) for the gradient of e (B, R, L) float32."""
    B, L, A = projected.shape
    R = query.shape[1]
    pool = _pool()
    for_query, for_weight = torch.empty_like(query), torch.empty(pool.threads, A)
    library = _library()
    assert library is not None
    library.additive_backward(
        pool, _is_bfloat16(projected), *_at(projected, query, weight, gradient, for_query, for_weight), B, R, L, A
    )
    return for_query, for_weight.sum(dim=0)


def backward_projected(
    projected: Tensor, queries: Sequence[Tensor], weight: Tensor, gradients: Sequence[Tensor]
) -> Tensor:
    """Return the gradient of P (B, L, A) over T steps, given each step's q (B, R, A) and gradient of e (B, R, L)."""
    B, L, A = projected.shape
    R, T = queries[0].shape[1], len(queries)
    for_projected = torch.empty_like(projected)
    pointers = _Pointer * T
    library = _library()
    assert library is not None
    library.additive_backward_projected(
        _pool(),
        _is_bfloat16(projected),
        *_at(projected),
        pointers(*_at(*queries)),
        *_at(weight),
        pointers(*_at(*gradients)),
        *_at(for_projected),
        *(T, B, R, L, A),
    )
    return for_projected


def _at(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _is_bfloat16(tensor: Tensor) -> int:
    return int(tensor.dtype is torch.bfloat16)


def _pool() -> _Pool:
    runtime = _openmp()
    if runtime is None:
        return _Pool(None, None, 1)
    return _Pool(*runtime, torch.get_num_threads())


@functools.cache
def _openmp() -> tuple[int, int] | None:
    """Return the addresses of GOMP_parallel and omp_get_thread_num in the runtime that PyTorch itself uses."""
    try:
        loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        loaded = {str(path) for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*")}
    for path in sorted(loaded):
        if Path(path).name.startswith(("libgomp", "libomp", "libiomp")):
            library = ctypes.CDLL(path)
            if hasattr(library, "GOMP_parallel"):  # LLVM's and Intel's runtimes have it too
                functions = (library.GOMP_parallel, library.omp_get_thread_num)
                first, second = (ctypes.cast(function, _Pointer).value for function in functions)
                if first and second:
                    return first, second
    return None


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None, with one line that says why, where they cannot be compiled."""
    compiler = os.environ.get("CC", "cc")
    flags = [*_FLAGS, _WIDE] if platform.machine() in ("x86_64", "AMD64") else _FLAGS
    # The processor is part of the name: -march=native, and home folders that several machines share.
    key = hashlib.sha256("\n".join([compiler, *flags, _processor(), _SOURCE.read_text()]).encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "captioning"
    path = folder / f"additive-{key[:16]}.so"
    try:
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                built = Path(temporary) / path.name
                subprocess.run(
                    [compiler, *flags, "-o", built, _SOURCE], check=True, capture_output=True, text=True, timeout=120
                )
                os.replace(built, path)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        _log.warning("the additive score runs on PyTorch's operations, which is slower: cannot compile (%s)", reason)
        return None
    for name, pointers, sizes in (
        ("additive_forward", 4, 4),
        ("additive_backward", 6, 4),
        ("additive_backward_projected", 5, 5),
    ):
        function = getattr(library, name)
        function.restype = None
        function.argtypes = [ctypes.POINTER(_Pool), ctypes.c_int, *[_Pointer] * pointers, *[ctypes.c_long] * sizes]
    return library


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
