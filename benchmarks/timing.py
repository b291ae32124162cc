"""Wall-clock times of subjects that take turns in one process, so that load drift affects all of them equally."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch


class Setup(NamedTuple):
    """How a subject is measured.

    Attributes:
        device: Device of models and batches.
        quick: Whether sizes are tiny, which shows that the benchmark runs; its numbers then say nothing.
        rounds: Times that each subject is measured.
    """

    device: torch.device
    quick: bool
    rounds: int


class Timing(NamedTuple):
    """Seconds of each round, in order."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The bounds of the middle half of the rounds."""
        if len(self.seconds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def per_item(self, count: int) -> Timing:
        """Return the times of one of ``count`` equal items."""
        return Timing(tuple(value / count for value in self.seconds))

    def speedup_over(self, baseline: Timing) -> float:
        """Return how many times as long the baseline takes: the median of the ratios within each round."""
        return statistics.median(b / a for a, b in zip(self.seconds, baseline.seconds, strict=True))


def interleave(subjects: Mapping[str, Callable[[], Any]], setup: Setup, *, warm_up: int = 1) -> dict[str, Timing]:
    """Time every subject once a round, in reverse order every other round.

    Args:
        subjects: Functions to call, by name.
        setup: The device is synchronized before and after each call.
        warm_up: Uncounted calls of each subject before the first round.
    """
    for _ in range(warm_up):
        for call in subjects.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    is_gc_enabled = gc.isenabled()
    for round_number in range(setup.rounds):
        gc.collect()
        gc.disable()
        try:
            for name in list(subjects)[:: -1 if round_number % 2 else 1]:
                wait_for(setup.device)
                start = time.perf_counter()
                subjects[name]()
                wait_for(setup.device)
                seconds[name].append(time.perf_counter() - start)
        finally:
            if is_gc_enabled:
                gc.enable()
    return {name: Timing(tuple(times)) for name, times in seconds.items()}


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
