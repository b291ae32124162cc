"""Sums over all processes of a run, so that their batches count as one. With one process they do nothing.

Data-parallel training differentiates one loss per process and takes the *mean* of the gradients. That is the gradient
of the whole batch only if every process multiplies each of its means by its ``relative_size``.
"""

from __future__ import annotations

from typing import Any

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


def sum_over_processes(values: Tensor) -> Tensor:
    """Return the sum over all processes, which must all call this; its gradient is that of the sum of their losses."""
    return values if process_count() == 1 else _Sum.apply(values)


def relative_size(count: int | Tensor, device: torch.device) -> Tensor | float:
    """Return this process's count of words or captions, divided by the mean count of a process; 1 with one process."""
    if process_count() == 1:
        return 1.0
    counted = torch.as_tensor(count, dtype=torch.float64, device=device)
    return (counted * process_count() / sum_over_processes(counted)).float()
