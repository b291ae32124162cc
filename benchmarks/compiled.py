"""A training step as it is beside the same with a compiled recurrence, which no default uses.

``python -m benchmarks.compiled [DEVICE] [--quick]`` prints medians in milliseconds, and the seconds of the first step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.models import Data
from benchmarks.timing import interleave, wait_for
from benchmarks.training import PRECISIONS, cases, our_step
from captioning.kernels.compilation import Mode


def measure(device: torch.device, *, quick: bool, rounds: int = 7) -> dict[str, float]:
    """Return the seconds of a training step by precision and mode, those of the first compiled one included."""
    case = cases(quick)["512"]
    data = Data.make(case.sizes, device)
    modes: tuple[Mode | None, ...] = (
        (None, "default", "reduce-overhead") if device.type == "cuda" else (None, "default")
    )
    subjects: dict[str, Callable[[], None]] = {}
    seconds = {}
    for precision, dtype in PRECISIONS.items():
        for mode in modes:
            name = f"{precision} {mode or 'eager'}"
            step = partial(our_step(case.sizes, device, precision=dtype, compile=mode), data.batch())
            start = time.perf_counter()
            step()
            wait_for(device)
            seconds[f"{name}, first step"] = time.perf_counter() - start
            subjects[name] = step
    timings = interleave(subjects, rounds=rounds, device=device, warm_up=3)
    return seconds | {name: timing.median for name, timing in timings.items()}


if __name__ == "__main__":
    names = [argument for argument in sys.argv[1:] if argument != "--quick"]
    for name, taken in measure(torch.device(*names or ["cpu"]), quick="--quick" in sys.argv).items():
        print(f"{name:32} {1000 * taken:10.1f} ms")
