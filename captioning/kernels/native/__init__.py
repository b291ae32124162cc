"""Kernels in C for the CPU, compiled once per machine with its C compiler (``CC``, or ``cc``) into the user's cache.

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

import torch
from torch import Tensor

from captioning.files import cache_folder, complete, read_bytes
from captioning.kernels.machine import instruction_limit, processor_flags

_FOLDER = Path(__file__).parent
# fast-math lets sums be reordered and so vectorised. It is not given to the linker, which would change how the whole
# process rounds tiny numbers. NaN stays NaN, so that a diverging run shows it.
_FLAGS = "-O3 -ffast-math -fno-finite-math-only -funroll-loops -fPIC".split()
_WIDE = "-mprefer-vector-width=512"
_TYPES = (torch.float32, torch.bfloat16)

Pointer = ctypes.c_void_p
_SIGNATURES = {  # function: number of pointers after the pool and the type, number of sizes
    "additive_exponentials": (2, 1),
    "additive_forward": (6, 5),
    "additive_backward": (8, 5),
    "additive_backward_projected": (7, 6),
    "lstm_forward": (7, 3),
    "lstm_backward": (7, 2),
    "linear_forward": (4, 3),
    "mixture_exponentials": (4, 2),
    "mixture_log_probs": (6, 2),
    "mixture_ratios": (5, 2),
    "mixture_gradient": (5, 2),
    "cross_entropy_forward": (5, 2),
    "cross_entropy_backward": (6, 2),
}

_log = logging.getLogger(__name__)


class _Pool(ctypes.Structure):
    _fields_ = (("parallel", Pointer), ("thread", Pointer), ("team", Pointer), ("threads", ctypes.c_long))


def usable(tensor: Tensor) -> bool:
    """Return whether the kernels support this tensor's device and type."""
    return tensor.device.type == "cpu" and tensor.dtype in _TYPES and _library() is not None


def call(function: str, dtype: torch.dtype, *arguments: Tensor | ctypes.Array | int | None) -> None:
    """Call a kernel with tensors and arrays of pointers, then sizes. None is the null pointer.

    Tensors must be contiguous unless the kernel's comment says otherwise.
    """
    library = _library()
    assert library is not None
    plain = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
    getattr(library, function)(_pool(), int(dtype is torch.bfloat16), *plain)


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
def _library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None if they cannot be compiled, with a warning that says why."""
    command = os.environ.get("CC") or "cc"
    try:
        compiler = shlex.split(command)
    except ValueError:  # an unclosed quote: there is no such program
        compiler = [command]
    limit = instruction_limit()
    flags = [*_FLAGS, f"-march={'native' if limit is None else limit.march}"]
    flags += [_WIDE] if platform.machine() in ("x86_64", "AMD64") else []
    sources = sorted(_FOLDER.glob("*.c"))
    # The name depends on the processor, because of -march=native and home folders that several machines share.
    texts = [path.read_text() for path in sorted(_FOLDER.glob("*.[ch]"))]
    content = "\n".join([*compiler, *flags, processor_flags(), *texts])
    build = hashlib.sha256(content.encode()).hexdigest()[:16]
    try:
        path = _compiled(build) or _compile(compiler, flags, sources, build)
        library = ctypes.CDLL(str(path))
        _declare(library)
    except (OSError, subprocess.SubprocessError, AttributeError) as error:  # AttributeError: it lacks a function
        reason = ((getattr(error, "stderr", None) or str(error)).strip().splitlines() or ["no reason given"])[-1]
        _log.warning("no C kernels, the decoder runs on PyTorch's operations, which is slower: %s", reason)
        return None
    return library


def _declare(library: ctypes.CDLL) -> None:
    for name, (count, sizes) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = None
        function.argtypes = [ctypes.POINTER(_Pool), ctypes.c_int, *[Pointer] * count, *[ctypes.c_long] * sizes]


def _compiled(build: str) -> Path | None:
    """Return the library of a build in the user's cache; None if it is missing or damaged.

    Its name ends in its checksum. A damaged library must not be loaded: the process would die at the first page that
    is missing.
    """
    for path in sorted(cache_folder().glob(f"kernels-{build}-*.so")):
        if path.name == _name(build, read_bytes(path)):
            return path
        _log.warning("%s: is not what was compiled; it is compiled again", path)
        path.unlink(missing_ok=True)
    return None


def _name(build: str, content: bytes) -> str:
    """Return the file name of a library, with the checksum of its build and its content."""
    return f"kernels-{build}-{hashlib.sha256(build.encode() + content).hexdigest()[:16]}.so"


def _compile(compiler: list[str], flags: list[str], sources: list[Path], build: str) -> Path:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        objects = [f"{temporary}/{source.stem}.o" for source in sources]
        built = f"{temporary}/kernels.so"
        steps = [[*compiler, *flags, "-c", str(source), "-o", o] for source, o in zip(sources, objects, strict=True)]
        for arguments in (*steps, [*compiler, "-shared", *objects, "-o", built]):
            subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=120)
        path = folder / _name(build, read_bytes(Path(built)))
        complete(path, Path(built))  # several processes may compile at once
    return path
