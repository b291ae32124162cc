"""Kernels in C for the CPU, compiled once per machine with its C compiler (``CC``, or ``cc``) into the user's cache.
Options in ``CC`` win, such as ``CC="cc -march=x86-64-v3"`` for a processor with AVX2 at most.

Without a compiler, callers fall back to PyTorch's operations, which compute the same more slowly.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from pathlib import Path

import platformdirs
import torch
from torch import Tensor

_FOLDER = Path(__file__).parent
# fast-math lets sums be reordered and so vectorised. It is not given to the linker, which would change how the whole
# process rounds tiny numbers. NaN stays NaN, so that a diverging run shows it.
_FLAGS = "-O3 -ffast-math -fno-finite-math-only -funroll-loops -fPIC -march=native".split()
_TYPES = (torch.float32, torch.bfloat16)

Pointer = ctypes.c_void_p
_SIGNATURES = {  # function: number of pointers after the pool and the type, number of sizes
    "additive_forward": (5, 5),
    "additive_backward": (7, 5),
    "additive_backward_projected": (7, 6),
}

_log = logging.getLogger(__name__)


class _Pool(ctypes.Structure):
    _fields_ = (("parallel", Pointer), ("thread", Pointer), ("team", Pointer), ("threads", ctypes.c_long))


def usable(tensor: Tensor) -> bool:
    """Return whether the kernels support this tensor's device and type."""
    return tensor.device.type == "cpu" and tensor.dtype in _TYPES and library() is not None


def call(function: str, dtype: torch.dtype, *arguments: Tensor | ctypes.Array | int) -> None:
    """Call a kernel with tensors and arrays of pointers, then sizes. Tensors must be contiguous."""
    kernels = library()
    assert kernels is not None
    plain = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
    getattr(kernels, function)(_pool(), int(dtype is torch.bfloat16), *plain)


def threads() -> int:
    """Return the largest number of threads that a kernel uses; the runtime may provide fewer."""
    return 1 if _openmp() is None else torch.get_num_threads()


def pointers(tensors: tuple[Tensor, ...]) -> ctypes.Array:
    """Return the addresses of several tensors as one argument."""
    return (Pointer * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _pool() -> _Pool:
    return _Pool(*(_openmp() or (None, None, None)), threads())


@functools.cache
def _openmp() -> tuple[int, ...] | None:
    """Return the addresses of ``Pool``'s functions in the OpenMP runtime that PyTorch itself uses."""
    package = Path(torch.__file__).parent
    folders = (package / "lib", package.parent / "torch.libs")
    try:
        fields = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
        loaded = {line[5] for line in fields if len(line) == 6}  # a path may contain blanks
    except OSError:
        loaded = {str(path) for path in folders[0].glob("lib*omp*")}
    for path in sorted(loaded, key=lambda path: (Path(path).parent not in folders, path)):  # PyTorch's first
        if Path(path).name.startswith(("libgomp", "libomp", "libiomp")):
            library = ctypes.CDLL(path)
            if hasattr(library, "GOMP_parallel"):  # LLVM's and Intel's runtimes have it too
                functions = (library.GOMP_parallel, library.omp_get_thread_num, library.omp_get_num_threads)
                addresses = [ctypes.cast(function, Pointer).value for function in functions]
                if all(addresses):
                    return tuple(address for address in addresses if address)
    return None


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None if they cannot be compiled, with a warning that says why."""
    compiler, *options = shlex.split(os.environ.get("CC") or "cc")
    wide = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
    command = [compiler, *_FLAGS, *wide, *options]
    # The name depends on the processor, because of -march=native and home folders that several machines share.
    texts = [path.read_text() for path in sorted(_FOLDER.glob("*.[ch]"))]
    build = hashlib.sha256("\n".join([*command, _processor(), *texts]).encode()).hexdigest()[:16]
    path = platformdirs.user_cache_path("captioning", appauthor=False) / f"kernels-{build}.so"
    try:
        if not path.exists():
            _compile(command, path)
        kernels = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        reason = ((getattr(error, "stderr", None) or str(error)).strip().splitlines() or ["no reason given"])[-1]
        _log.warning("no C kernels, the decoder runs on PyTorch's operations, which is slower: %s", reason)
        return None
    for name, (count, sizes) in _SIGNATURES.items():
        function = getattr(kernels, name)
        function.restype = None
        function.argtypes = [ctypes.POINTER(_Pool), ctypes.c_int, *[Pointer] * count, *[ctypes.c_long] * sizes]
    return kernels


def _processor() -> str:
    """Return the line in which the system lists the instructions of this processor, or the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _compile(command: list[str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # several processes may compile at once
        compiled, linked = f"{folder}/additive.o", f"{folder}/additive.so"
        for arguments in (
            [*command, "-c", str(_FOLDER / "additive.c"), "-o", compiled],
            [command[0], "-shared", compiled, "-o", linked],
        ):
            subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=120)
        os.replace(linked, path)
