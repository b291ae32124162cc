"""A linear layer for few rows: the beams of a search, or a small training batch.

Such a product takes as long as reading the weights. Libraries first rearrange the weights for large products, which
costs more than a small product takes; the kernel (``native/linear.c``) reads them once, in order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from captioning.kernels import native

FEW = 18
"""Largest number of rows that the kernel takes: three tiles of AVX2. Two threads are faster then, one is not."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b for x (..., in), W (out, in), b (out,), as ``torch.nn.functional.linear`` does."""
    if not _is_few(x, weight):
        return nn.functional.linear(x, weight, bias)
    M, K = weight.shape
    N = x.numel() // K
    y = torch.empty(*x.shape[:-1], M, dtype=torch.float32)
    native.call("linear_forward", x.dtype, x.contiguous(), weight, bias, y, N, M, K)
    return y


def _is_few(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel is faster for x and supports it; the kernel has no gradient."""
    return (
        not torch.compiler.is_compiling()  # first: a graph would be for this number of rows alone
        and not torch.is_grad_enabled()
        and x.shape[-1] == weight.shape[1]
        and 0 < x.numel() <= FEW * weight.shape[1]
        and x.dtype is weight.dtype is torch.float32
        and weight.is_cpu
        and weight.is_contiguous()
        and not torch.is_autocast_enabled("cpu")
        and native.usable(x)
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
