"""Dropout with two random bytes per unit, because the random generator dominates its time on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LEVELS = 1 << 16


class Dropout(nn.Module):
    """Zeroes each unit with probability ``p`` in training, and divides the others by 1 - p.

    Args:
        p: Probability of dropping a unit, on a CPU rounded to a multiple of 2^-16. The divisor is 1 minus the rounded
            value, so that the mean stays exact.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout must be a probability below 1, got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        if x.device.type != "cpu":
            return nn.functional.dropout(x, self.p)
        dropped = round(self.p * _LEVELS)
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(1 << 63), None)  # all 64 bits
        levels = words.view(torch.int16)[: x.numel()].view_as(x)
        keep = levels >= dropped - _LEVELS // 2
        return x * keep.to(x.dtype).mul_(_LEVELS / (_LEVELS - dropped))

    def extra_repr(self) -> str:
        return f"p={self.p}"
