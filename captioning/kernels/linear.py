"""x W^T + b, faster for the few rows of a search, and with W's gradient computed once for all steps of a recurrence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from captioning.kernels.unroll import Use, deferred_product, deferred_uses

FEW = range(2, 9)
"""Numbers of rows, such as the beams of one image, for which a CPU multiplies x W^T faster as (W x^T)^T."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b for x (..., in), W (out, in), b (out,), as ``torch.nn.functional.linear`` does."""
    if deferred_uses(weight) is not None:
        rows = x.to(weight.dtype).flatten(0, -2)
        y = deferred_product(rows, weight, _product, torch.matmul, _weight_gradient)
        bias = None if bias is None else bias.to(weight.dtype)
    elif _is_few(x, weight):
        y = _product(x.flatten(0, -2), weight)
    else:
        return nn.functional.linear(x, weight, bias)
    y = y.unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return (weight @ x.t()).t().contiguous() if _is_few(x, weight) else nn.functional.linear(x, weight)


def _weight_gradient(weight: Tensor, uses: list[Use]) -> Tensor:
    inputs, gradients = zip(*uses, strict=True)
    return torch.cat(gradients).t() @ torch.cat(inputs)


def _is_few(x: Tensor, weight: Tensor) -> bool:
    return (
        not torch.is_grad_enabled()
        and x.is_cpu
        and x.dtype is weight.dtype is torch.float32
        and x.shape[:-1].numel() in FEW
        and not torch.is_autocast_enabled("cpu")
    )
