"""Sums over all processes of a run, so that their batches count as one. With one process they do nothing.

Data-parallel training differentiates one loss per process and takes the *mean* of the gradients. That is the gradient
of the whole batch only if every process scales each of its terms by its fraction of the term's denominator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable


def process_count() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.contiguous().clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Sum.forward(ctx, gradient)  # the sum enters the losses of all processes


def summed(values: Tensor) -> Tensor:
    """Return the sum over all processes, which must all call this; its gradient is that of the sum of their losses."""
    return values if process_count() == 1 else _Sum.apply(values)


class ProcessFactors(NamedTuple):
    """Factors of a process's terms, such that their mean over processes is the term of the whole batch.

    Attributes:
        words: For a mean over words: this process's words divided by the mean number of words of a process.
        captions: For a mean over captions, likewise.
        processes: For a sum: the number of processes.
    """

    words: Tensor
    captions: Tensor
    processes: int

    @classmethod
    def of(cls, mask: Tensor) -> ProcessFactors | None:
        """Return the factors of a batch with steps ``mask`` (N, T) bool; None if there is one process."""
        processes = process_count()
        if processes == 1:
            return None
        counts = torch.stack((mask.sum(), torch.full_like(mask.sum(), len(mask)))).double()
        words, captions = (counts * processes / summed(counts)).float()
        return cls(words, captions, processes)
