"""Wall-clock times of several subjects measured in turn, so that load drift affects all of them equally."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch


class Timing(NamedTuple):
    """Seconds of the rounds, in their order."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of the rounds lie between these two."""
        if len(self.seconds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def each(self, count: int) -> Timing:
        """Return the times of one of ``count`` equal parts."""
        return Timing(tuple(taken / count for taken in self.seconds))

    def ratio(self, other: Timing) -> float:
        """Return how many times as long the other one takes: the median over rounds, each compared within itself."""
        return statistics.median(b / a for a, b in zip(self.seconds, other.seconds, strict=True))


def interleave(
    subjects: Mapping[str, Callable[[], Any]], *, rounds: int, device: torch.device, warm_up: int = 1
) -> dict[str, Timing]:
    """Time every subject once a round, every other round in reverse order.

    Args:
        subjects: what to call.
        rounds: times each is measured.
        device: synchronised before and after each call if it computes asynchronously.
        warm_up: calls of each before the first round, not counted.
    """
    for subject in subjects.values():
        for _ in range(warm_up):
            subject()
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    collecting = gc.isenabled()
    for turn in range(rounds):
        gc.collect()
        gc.disable()
        try:
            for name in list(subjects)[:: -1 if turn % 2 else 1]:
                wait_for(device)
                start = time.perf_counter()
                subjects[name]()
                wait_for(device)
                seconds[name].append(time.perf_counter() - start)
        finally:
            if collecting:
                gc.enable()
    return {name: Timing(tuple(taken)) for name, taken in seconds.items()}


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
