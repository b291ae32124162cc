"""What this machine computes best in: its instructions, a limit to fewer of them, and the precision of a model.

A processor without bfloat16 products still multiplies bfloat16, through code that is far slower than float32's. PyTorch
is imported where it is needed, because ``limit_instructions`` must come first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from captioning.errors import InputError
from captioning.files import cache_folder, read_json, write_json

LIMIT = "CAPTIONING_ISA"
"""Environment variable that names the instruction set that is used at most: avx2 or avx512."""

_HALVES = ("bf16", "bf16-mixed", "bf16-true", "16", "16-mixed", "16-true")
_ROWS, _IN, _OUT = 32, 256, 1024  # of the product that is timed: it takes about a millisecond where it is slow


class Level(NamedTuple):
    """An x86 instruction set.

    Attributes:
        march: Name for a C compiler.
        pytorch: Value of ATEN_CPU_CAPABILITY.
        onednn: Value of ONEDNN_MAX_CPU_ISA, of the library that multiplies matrices for PyTorch.
        flags: What a processor that has it says of itself.
    """

    march: str
    pytorch: str
    onednn: str
    flags: frozenset[str]


LEVELS = {
    "avx2": Level("x86-64-v3", "avx2", "AVX2", frozenset({"avx2", "fma", "bmi2"})),
    "avx512": Level("x86-64-v4", "avx512", "AVX512_CORE", frozenset("avx512f avx512dq avx512bw avx512vl".split())),
}
"""The levels that ``CAPTIONING_ISA`` takes. None of them has bfloat16 products."""


def limit_instructions() -> None:
    """Limit PyTorch to the instructions that ``CAPTIONING_ISA`` allows. Must be called before torch is imported.

    Raises:
        InputError: The variable names no level, or one that this processor does not have.
    """
    if (level := instruction_limit()) is not None:
        os.environ["ATEN_CPU_CAPABILITY"] = level.pytorch
        os.environ["ONEDNN_MAX_CPU_ISA"] = level.onednn


def instruction_limit() -> Level | None:
    """Return the level that ``CAPTIONING_ISA`` names; None if it is not set.

    Raises:
        InputError: It is no level, or one that this processor does not have.
    """
    name = os.environ.get(LIMIT)
    if not name:
        return None
    if name not in available_levels():
        here = ", ".join(available_levels()) or "none, because this is no x86 processor"
        raise InputError(f"{LIMIT}={name}: must be a level that this processor has ({here}); leave it out for no limit")
    return LEVELS[name]


def available_levels() -> list[str]:
    """Return the names of the levels that this processor has."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    flags = set(processor_flags().split())
    return [name for name, level in LEVELS.items() if level.flags <= flags]


def processor_flags() -> str:
    """Return the line in which the system lists the instructions of this processor, or the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def instructions() -> str:
    """Return what the processor computes with, such as "AVX512 with bfloat16 products" or "AVX2"."""
    import torch

    return torch.backends.cpu.get_cpu_capability() + " with bfloat16 products" * has_bfloat16_products()


def has_bfloat16_products() -> bool:
    """Return whether this processor has instructions that multiply bfloat16, and may use them."""
    import torch

    has = torch.cpu.get_capabilities().get
    return instruction_limit() is None and any(
        has(name) for name in ("amx_bf16", "avx512_bf16", "avx10_2", "bf16", "sve_bf16")
    )


# Precision


def best_precision(device: str) -> str:
    """Return the precision, as Lightning names it, in which models are trained and scored fastest on "cpu" or "cuda".

    It is "bf16-mixed" where the device has bfloat16 products, "16-mixed" on older GPUs, and else "32-true". A processor
    must also be faster in bfloat16 than in float32 (see ``bfloat16_time``): some have the instructions alone.
    """
    if device == "cuda":
        return "bf16-mixed" if _gpus_have_bfloat16() else "16-mixed"
    faster = device == "cpu" and has_bfloat16_products() and bfloat16_time() < 1
    return "bf16-mixed" if faster else "32-true"


def chosen_precision(device: str) -> tuple[str, str]:
    """Return ``best_precision`` and the line that a run says about it."""
    precision = best_precision(device)
    if device == "cuda":
        reason = "this GPU has " + ("bfloat16 products" if _gpus_have_bfloat16() else "no bfloat16 products")
    elif device != "cpu":
        reason = f"no other is measured on {device}"
    elif has_bfloat16_products():
        reason = f"{instructions()}, {_times(bfloat16_time())} float32's time"
    else:
        reason = f"this processor ({instructions()}) has no bfloat16 products"
    return precision, f"precision: {precision} ({reason})"


def cost_of_precision(precision: str, device: str) -> str | None:
    """Return a line on what an asked-for precision costs on a device without products for it; None if it has them."""
    if device == "cuda" and precision.startswith("bf16") and not _gpus_have_bfloat16():
        return f"precision: {precision} was asked for, but this GPU has no bfloat16 products; 16-mixed is faster"
    if device != "cpu" or precision not in _HALVES or best_precision("cpu") != "32-true":
        return None
    return (
        f"precision: {precision} was asked for, but this processor ({instructions()}) is slow in it: a small matrix "
        f"product takes {_times(bfloat16_time())} float32's time, and a training step more; 32-true is faster"
    )


def _gpus_have_bfloat16() -> bool:
    import torch

    return all(torch.cuda.get_device_capability(number) >= (8, 0) for number in range(torch.cuda.device_count()))


def _times(ratio: float) -> str:
    return f"{ratio:.1f} times"


@functools.cache
def bfloat16_time() -> float:
    """Return the time of a small matrix product in bfloat16 as a multiple of float32's time.

    It is measured once, in less than 50 ms, and kept in the user's cache for this processor, version of PyTorch and
    limit of the instructions. Where the cache cannot be written, every process measures.
    """
    import torch

    machine = f"{processor_flags()} {platform.processor()} {torch.__version__} {os.environ.get(LIMIT)}"
    path = cache_folder(f"bfloat16-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json")
    try:
        ratio = float(read_json(path)["times_float32"])
        if ratio > 0:
            return ratio
    except (InputError, KeyError, TypeError, ValueError):  # it is not there yet, or damaged
        pass
    ratio = _measured_bfloat16_time()
    with contextlib.suppress(InputError):
        write_json(path, {"times_float32": ratio, "instructions": instructions()})
    return ratio


def _measured_bfloat16_time() -> float:
    import torch

    x, weight = torch.ones(_ROWS, _IN), torch.ones(_OUT, _IN)
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        arguments = (x.to(dtype), weight.to(dtype))
        seconds.append(_shortest(functools.partial(torch.nn.functional.linear, *arguments)))
    return seconds[1] / seconds[0]


def _shortest(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some calls, after one that prepares the product."""
    call()
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
