"""Sums over all processes of a run, so that their batches count as one. With one process they do nothing.

Data-parallel training differentiates one loss per process and takes the *mean* of the gradients. That is the gradient
of the whole batch only if every process multiplies each of its means by its ``relative_size``.
"""

import torch
from torch import Tensor, distributed


def process_count() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def sum_over_processes(values: Tensor) -> Tensor:
    """Return the sum over all processes, which must all call this; ``values`` and the sum have no gradient."""
    if process_count() == 1:
        return values
    values = values.contiguous().clone()
    distributed.all_reduce(values)
    return values


def relative_size(count: int | Tensor, device: torch.device) -> Tensor | float:
    """Return this process's count of words or captions, divided by the mean count over processes."""
    if process_count() == 1:
        return 1.0
    count = torch.as_tensor(count, dtype=torch.float64, device=device)
    return (count * process_count() / sum_over_processes(count)).float()
