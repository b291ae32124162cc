"""Linear layers for few rows, such as the beams of one search, for logits that a search ranks, and autocast's type."""

from __future__ import annotations

import torch
from torch import Tensor, nn

FEW = range(2, 9)
"""Numbers of rows for which a CPU multiplies x W^T faster as (W x^T)^T."""


def to_autocast(x: Tensor) -> Tensor:
    """Return ``x`` in autocast's type, so that a tensor which every step uses is converted once."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b for x (..., in), W (out, in), b (out,), as ``torch.nn.functional.linear`` does."""
    if not _is_few(x, weight):
        return nn.functional.linear(x, weight, bias)
    y = (weight @ x.flatten(0, -2).t()).t().contiguous().unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


def _is_few(x: Tensor, weight: Tensor) -> bool:
    return (
        not torch.is_grad_enabled()
        and x.is_cpu
        and x.dtype is weight.dtype is torch.float32
        and x.shape[:-1].numel() in FEW
        and not torch.is_autocast_enabled("cpu")
    )


class Linear(nn.Linear):
    """``nn.Linear`` computed by ``linear``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out) for x (..., in)."""
        return linear(x, self.weight, self.bias)


def precise_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return ``layer`` of x (N, in) as (N, out), in at least float32, also under autocast.

    bfloat16 has 8 significant bits: the best two of thousands of logits are often equal, and their order in a search
    would be arbitrary.
    """
    device, wide = x.device.type, torch.promote_types(x.dtype, torch.float32)
    if layer.weight.dtype == x.dtype == wide and not torch.is_autocast_enabled(device):
        return layer(x)
    weight, bias = layer.weight.to(wide), layer.bias.to(wide)
    with torch.autocast(device, enabled=False):
        return nn.functional.linear(x.to(wide), weight, bias)
