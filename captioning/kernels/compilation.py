"""``torch.compile`` for a step of a recurrence: few shapes, compiled once each, and once for all runs on a machine."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Literal

import torch

from captioning.files import cache_folder

Mode = Literal["default", "reduce-overhead"]
"""As in ``torch.compile``: reduce-overhead replays CUDA graphs instead of launching a step's kernels one by one."""

_GROWTH = 9 / 8


class ShapeBuckets:
    """Numbers of images that a step is compiled for. Smaller batches are to be filled up."""

    def __init__(self) -> None:
        self._largest: dict[int, int] = {}

    def images(self, count: int, rows: int) -> int:
        """Return how many images a batch of ``count`` is to have, with ``rows`` rows each.

        All batches get the size of the largest one so far. Where a larger one comes, the size grows by at least an
        eighth, so that batches of ever other sizes make few of them; the size of the first batch is kept as it is.
        """
        largest = self._largest.get(rows, 0)
        if count > largest:
            self._largest[rows] = max(count, int(largest * _GROWTH))
        return self._largest[rows]


@functools.cache
def compiled(step: Callable[..., Any], mode: Mode) -> Callable[..., Any]:
    """Return ``step`` compiled for every shape on its own; what is compiled is kept in the user's cache folder."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder("inductor")))
    return torch.compile(step, dynamic=False, mode=mode)


def begin_training_step(mode: Mode) -> None:
    """Say that the results of the last training step's compiled steps may be overwritten."""
    if mode == "reduce-overhead" and torch.cuda.is_available():
        torch.compiler.cudagraph_mark_step_begin()
