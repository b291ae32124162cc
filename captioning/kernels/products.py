"""Products of queries and alphas with a batch's memory. The memory's gradients are computed once for all steps.

The additive score v . tanh(P + q) has a plain formula, and a fused one that never stores the hidden layer. The fused
one computes tanh again in the backward pass, so that memory does not grow with steps x locations x A. The kernels are
in ``additive_cpu`` and ``additive_cuda``, which have the same four functions.

Letters: P (B, L, A) are the projected annotations, q (B, R, A) the projected queries of R rows per image, v (A,) the
output weights, e (B, R, L) the logits.
"""

import functools
import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from captioning.kernels import additive_cpu
from captioning.kernels.deferred import Use, deferred_product, deferred_uses, pad_rows


def image_product(x: Tensor, matrices: Tensor) -> Tensor:
    """Return the products (B, R, out) of x (B, R, in) and matrices (B, in, out), image by image."""
    if deferred_uses(matrices) is None:
        return torch.bmm(x, matrices)
    return deferred_product(x, matrices, torch.bmm, lambda gradient, m: torch.bmm(gradient, m.mT), _matrices_gradient)


def _matrices_gradient(matrices: Tensor, uses: list[Use]) -> Tensor:
    inputs, gradients = (
        torch.cat([pad_rows(factor, len(matrices)) for factor in factors], dim=1) for factors in zip(*uses, strict=True)
    )
    return torch.bmm(inputs.mT, gradients)


def plain_additive_logits(projected: Tensor, query: Tensor, weight: Tensor) -> Tensor:
    """Return e (B, R, L) = v . tanh(P + q), Eq. 4, for P (B, L, A), q (B, R, A), v (A,). The reference."""
    hidden = torch.tanh(projected.unsqueeze(1) + query.unsqueeze(2))  # (B, R, L, A)
    return torch.nn.functional.linear(hidden, weight.unsqueeze(0)).squeeze(-1)


def additive_logits(projected: Tensor, query: Tensor, weight: Tensor) -> Tensor:
    """Return ``plain_additive_logits``; fused and float32 if a kernel supports the device and the type."""
    kernels = _kernels(projected)
    if kernels is None:
        return plain_additive_logits(projected, query, weight)
    return _AdditiveLogits.apply(kernels, projected, query, weight)


def _kernels(projected: Tensor) -> ModuleType | None:
    kernels = _cuda_kernels() if projected.is_cuda else additive_cpu
    return kernels if kernels is not None and kernels.supports(projected) else None


@functools.cache
def _cuda_kernels() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from captioning.kernels import additive_cuda

    return additive_cuda


class _AdditiveLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, projected: Tensor, query: Tensor, weight: Tensor) -> Tensor:
        ctx.kernels, ctx.weight_type, ctx.deferred_uses = kernels, weight.dtype, deferred_uses(projected)
        projected, query, weight = projected.contiguous(), query.contiguous(), weight.float().contiguous()
        ctx.save_for_backward(projected, query, weight)
        return kernels.forward(projected, query, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, Tensor, Tensor]:
        projected, query, weight = ctx.saved_tensors
        gradient = gradient.float().contiguous()
        dq, dv = ctx.kernels.backward(projected, query, weight, gradient)
        dP = None
        if ctx.deferred_uses is not None:
            ctx.deferred_uses[_projected_gradient].append((query, weight, gradient))
        elif ctx.needs_input_grad[1]:
            dP = _projected_gradient(projected, [(query, weight, gradient)])
        return None, dP, dq, dv.to(ctx.weight_type)


def _projected_gradient(projected: Tensor, uses: list[Use]) -> Tensor:
    """Return the gradient of P over all steps, given each step's q, v and gradient of e."""
    kernels = _kernels(projected)
    assert kernels is not None
    queries, weights, gradients = zip(*uses, strict=True)
    return kernels.backward_projected(projected.contiguous(), queries, weights[0], gradients)
