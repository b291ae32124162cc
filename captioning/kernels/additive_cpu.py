"""The additive score and its gradients in C (``native/additive.c``). Letters as in ``kernels.products``.

The kernels are compiled once per machine with its C compiler (``CC``, or ``cc``) into the user's cache. Options in
``CC`` come last and win, such as ``CC="cc -march=x86-64-v3"`` for a processor with AVX2 at most.
"""

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

_FOLDER = Path(__file__).parent / "native"
# -ffast-math lets the compiler reorder and so vectorize sums. -nostartfiles leaves out the start-up code that would
# flush tiny numbers to 0 in the whole process. With -fno-finite-math-only a diverging run shows NaN.
_FLAGS = "-O3 -ffast-math -fno-finite-math-only -funroll-loops -march=native -fPIC -shared -nostartfiles".split()
_TYPES = (torch.float32, torch.bfloat16)

_log = logging.getLogger(__name__)


def supports(projected: Tensor) -> bool:
    """Return whether the kernels support this tensor's device and type."""
    return projected.device.type == "cpu" and projected.dtype in _TYPES and load_library() is not None


def forward(projected: Tensor, query: Tensor, weight: Tensor) -> Tensor:
    """Return e (B, R, L)."""
    (B, L, A), R = projected.shape, query.shape[1]
    logits = torch.empty(B, R, L, dtype=torch.float32)
    _call("additive_forward", 1, R, projected, (query.float(), weight, logits), (B, R, L, A))
    return logits


def backward(projected: Tensor, query: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and v, given the gradient of e at one step."""
    (B, L, A), R = projected.shape, query.shape[1]
    dq, dv = torch.empty(B, R, A, dtype=torch.float32), torch.zeros(_thread_count(), A, dtype=torch.float32)
    arguments = (query.float(), weight, gradient, dq, dv)
    _call("additive_backward", 1, R, projected, arguments, (B, R, L, A))
    return dq.to(query.dtype), dv.sum(dim=0)


def backward_projected(
    projected: Tensor, queries: tuple[Tensor, ...], weight: Tensor, gradients: tuple[Tensor, ...]
) -> Tensor:
    """Return the gradient of P, given q and the gradient of e at all steps. A step may lack the last images."""
    (B, L, A), R, T = projected.shape, queries[0].shape[1], len(queries)
    queries = tuple(query.float() for query in queries)
    dP = torch.empty_like(projected)
    image_counts = torch.tensor([len(query) for query in queries], dtype=torch.int64)
    arguments = (_pointers(queries), weight, _pointers(gradients), image_counts, dP)
    _call("additive_backward_projected", T, R, projected, arguments, (T, B, R, L, A))
    return dP


class _Pool(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in ("parallel", "thread", "team")), ("threads", ctypes.c_long))


def _call(
    function: str,
    T: int,
    R: int,
    projected: Tensor,
    arguments: tuple[Tensor | ctypes.Array, ...],
    sizes: tuple[int, ...],
) -> None:
    """Call a kernel with contiguous tensors and arrays of pointers, working memory for all threads, and sizes."""
    size = (5 + (T + 2) * R) * -(-projected.shape[2] // 64) * 64  # as ``Scratch`` in additive.c
    scratch = torch.empty(_thread_count(), size, dtype=torch.float32)
    pointers = [
        ctypes.c_void_p(argument.data_ptr()) if isinstance(argument, Tensor) else argument
        for argument in (projected, *arguments, scratch)
    ]
    pool = _Pool(*(_openmp() or (None, None, None)), _thread_count())
    longs = map(ctypes.c_long, (scratch.shape[1], *sizes))
    getattr(load_library(), function)(ctypes.byref(pool), int(projected.dtype is torch.bfloat16), *pointers, *longs)


def _pointers(tensors: tuple[Tensor, ...]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _thread_count() -> int:
    """Return the largest number of threads that a kernel uses; the runtime may provide fewer."""
    return 1 if _openmp() is None else torch.get_num_threads()


@functools.cache
def _openmp() -> tuple[int | None, ...] | None:
    """Return the addresses of ``_Pool``'s functions in the OpenMP runtime that PyTorch itself uses, if any."""
    try:
        runtime = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))))  # and what it links to
        functions = (runtime.GOMP_parallel, runtime.omp_get_thread_num, runtime.omp_get_num_threads)
    except (StopIteration, OSError, AttributeError):
        return None
    return tuple(ctypes.cast(function, ctypes.c_void_p).value for function in functions)


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None if they cannot be compiled, with a warning that says why."""
    compiler, *options = shlex.split(os.environ.get("CC") or "cc")
    width = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
    command = [compiler, *_FLAGS, *width, *options]
    # The name depends on the processor, because of -march=native and home folders that several machines share.
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else [platform.processor()]
    instructions = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    sources = [path.read_text() for path in sorted(_FOLDER.glob("*.[ch]"))]
    digest = hashlib.sha256("\n".join([*command, *instructions, *sources]).encode()).hexdigest()[:16]
    path = platformdirs.user_cache_path("captioning", appauthor=False) / f"kernels-{digest}.so"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # several processes may compile at once
                arguments = [*command, str(_FOLDER / "additive.c"), "-o", f"{folder}/kernels.so"]
                subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=120)
                os.replace(f"{folder}/kernels.so", path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        reason = ((getattr(error, "stderr", None) or str(error)).strip().splitlines() or ["no reason given"])[-1]
        _log.warning("no C kernels, the decoder runs on PyTorch's operations, which is slower: %s", reason)
        return None
