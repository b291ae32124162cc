"""Dropout with two random bytes a unit: the generator dominates its time on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LEVELS = 1 << 16


class Dropout(nn.Dropout):
    """``nn.Dropout``, on a CPU with ``p`` rounded to a multiple of 2^-16.

    PyTorch's draws take a tenth of a training step of the summed likelihood, which drops units at every location.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p or not x.is_cpu:
            return super().forward(x)
        dropped = round(self.p * _LEVELS)
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(1 << 63), None)  # all 64 bits
        keep = words.view(torch.int16)[: x.numel()].view_as(x) >= dropped - _LEVELS // 2
        return x * keep.to(x.dtype).mul_(_LEVELS / (_LEVELS - dropped))  # so that the mean stays exact
