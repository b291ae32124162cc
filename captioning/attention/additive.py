"""The additive score v . tanh(P + q): the plain formula, and the same without its (rows, L, A) hidden layer in memory.

Of the fused form only e is kept for the backward pass, where tanh is computed again; P's gradient is computed once for
all steps of a caption. So memory does not grow with steps x locations x A, and neither does the time spent moving it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from captioning import native
from captioning.unroll import Use, uses_of


def plain_additive_logits(projected: Tensor, query: Tensor, weight: Tensor) -> Tensor:
    """Return e (B, R, L) = v . tanh(P + q), Eq. 4, for P (B, L, A), q (B, R, A), v (A,). The reference."""
    hidden = torch.tanh(projected.unsqueeze(1) + query.unsqueeze(2))  # (B, R, L, A)
    return torch.nn.functional.linear(hidden, weight.unsqueeze(0)).squeeze(-1)


def additive_logits(projected: Tensor, query: Tensor, weight: Tensor) -> Tensor:
    """Return what ``plain_additive_logits`` does; fused, and float32, where a kernel takes the device and the type."""
    if torch.compiler.is_compiling() or not native.usable(projected):
        return plain_additive_logits(projected, query, weight)
    return _AdditiveLogits.apply(projected, query, weight)


class _AdditiveLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, query: Tensor, weight: Tensor) -> Tensor:
        ctx.types = query.dtype, weight.dtype
        ctx.uses = uses_of(projected)
        projected, query, weight = projected.contiguous(), query.float().contiguous(), weight.float().contiguous()
        ctx.save_for_backward(projected, query, weight)
        (B, L, A), R = projected.shape, query.shape[1]
        logits = torch.empty(B, R, L)
        native.call("additive_forward", projected.dtype, projected, query, weight, logits, B, R, L, A)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        projected, query, weight = ctx.saved_tensors
        gradient = gradient.float().contiguous()
        (B, L, A), R = projected.shape, query.shape[1]
        for_query, for_weight = torch.empty_like(query), torch.empty(native.threads(), A)
        arguments = (projected, query, weight, gradient, for_query, for_weight)
        native.call("additive_backward", projected.dtype, *arguments, B, R, L, A)
        for_projected = None
        if ctx.uses is not None:
            ctx.uses[_projected_gradient].append((query, weight, gradient))
        elif ctx.needs_input_grad[0]:
            for_projected = _projected_gradient(projected, [(query, weight, gradient)])
        return for_projected, for_query.to(ctx.types[0]), for_weight.sum(dim=0).to(ctx.types[1])


def _projected_gradient(projected: Tensor, uses: list[Use]) -> Tensor:
    """Return the gradient of P over all steps, from their q, v and gradients of e."""
    projected = projected.contiguous()
    queries, weights, gradients = zip(*uses, strict=True)
    for_projected = torch.empty_like(projected)
    (B, L, A), R, T = projected.shape, queries[0].shape[1], len(queries)
    tables = native.pointers(queries), native.pointers(gradients)
    native.call(
        "additive_backward_projected",
        *(projected.dtype, projected, tables[0], weights[0], tables[1], for_projected),
        *(T, B, R, L, A),
    )
    return for_projected
