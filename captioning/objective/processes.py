"""The batches of all processes of a run as the one batch that they are parts of. Nothing is done where there is one.

Data-parallel training differentiates one loss per process and takes the *mean* of the gradients. That is the gradient
of the whole batch only if every process multiplies each of its terms with its share of what the term is divided by.
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
        return _Sum.forward(ctx, gradient)  # what is added up here reaches the losses of all processes


def summed(values: Tensor) -> Tensor:
    """Return the sum over all processes, which must all ask for it; its gradient is that of the sum of their losses."""
    return values if process_count() == 1 else _Sum.apply(values)


class Shares(NamedTuple):
    """What a process multiplies a term of its loss with, so that the mean over processes is the whole batch's term.

    Attributes:
        words: for a mean over words: this process's words by the mean number of words of a process.
        captions: for a mean over captions.
        processes: for a sum: their number.
    """

    words: Tensor
    captions: Tensor
    processes: int

    @classmethod
    def of(cls, mask: Tensor) -> Shares | None:
        """Return the shares of a batch with steps ``mask`` (N, T) bool; None where there is one process."""
        processes = process_count()
        if processes == 1:
            return None
        own = torch.stack((mask.sum(), torch.full_like(mask.sum(), len(mask)))).double()
        words, captions = (own * processes / summed(own)).float()
        return cls(words, captions, processes)
