"""``torch.compile`` for a step of a recurrence: few shapes, compiled once and cached for all runs on a machine."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Literal

import torch

from captioning.files import cache_folder

Mode = Literal["default", "reduce-overhead"]
"""As in ``torch.compile``: "reduce-overhead" replays CUDA graphs instead of launching kernels one by one."""

_GROWTH = 9 / 8


class ShapeBuckets:
    """The batch sizes that a step is compiled for. Smaller batches are to be padded."""

    def __init__(self) -> None:
        self._largest: dict[int, int] = {}

    def images(self, count: int, rows: int) -> int:
        """Return the padded number of images of a batch of ``count`` images with ``rows`` rows each.

        All batches are padded to the largest size so far. For a larger batch that size grows by at least an eighth, so
        that varying batch sizes cause few compilations. The first batch is not padded.
        """
        largest = self._largest.get(rows, 0)
        if count > largest:
            self._largest[rows] = max(count, int(largest * _GROWTH))
        return self._largest[rows]


@functools.cache
def compiled(step: Callable[..., Any], mode: Mode) -> Callable[..., Any]:
    """Return ``step`` compiled separately for every shape; compiled code is kept in the user's cache folder."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder("inductor")))
    return torch.compile(step, dynamic=False, mode=mode)


def begin_training_step(mode: Mode) -> None:
    """Allow compiled steps to overwrite their results from the last training step."""
    if mode == "reduce-overhead" and torch.cuda.is_available():
        torch.compiler.cudagraph_mark_step_begin()
