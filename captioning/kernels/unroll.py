"""Gradients of tensors that every step of a recurrence uses, computed once at the end of the backward pass.

The gradient of a weight that T steps use is a sum of T small products. Autograd computes and adds them one by one.
Here the steps store their factors, and one large product at the end gives the same sum:

    weight = deferred(weight)
    for x in steps:
        y = linear(x, weight)

A tensor that was not passed to ``deferred``, or that needs no gradient, takes the ordinary path of autograd.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from captioning.kernels.linear import Linear, to_autocast
from captioning.kernels.linear import linear as linear_layer

Product = Callable[[Tensor, Tensor], Tensor]
Use = tuple[Tensor, ...]
DeferredGradient = Callable[[Tensor, list[Use]], Tensor]
"""Called with the deferred tensor and the factors that the steps stored; returns the tensor's gradient."""


class _Defer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        ctx.set_materialize_grads(False)
        ctx.deferred_uses = defaultdict(list)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        """Runs after the backward pass of all steps, because every step uses this node's output."""
        (tensor,) = ctx.saved_tensors
        for deferred_gradient, uses in ctx.deferred_uses.items():
            sum_over_steps = deferred_gradient(tensor, uses)
            gradient = sum_over_steps if gradient is None else gradient + sum_over_steps
        ctx.deferred_uses.clear()
        return gradient


def deferred(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with a list in which steps store the factors of its gradient."""
    return _Defer.apply(tensor) if tensor.requires_grad and torch.is_grad_enabled() else tensor


class _Leading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, count: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.deferred_uses, ctx.missing = deferred_uses(tensor), len(tensor) - count
        return tensor[:count]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return None if gradient is None else padded(gradient, len(gradient) + ctx.missing), None


def leading(tensor: Tensor, count: int) -> Tensor:
    """Return the first ``count`` entries of ``tensor``; steps that use them store their factors with ``tensor``."""
    return tensor[:count] if deferred_uses(tensor) is None else _Leading.apply(tensor, count)


def padded(x: Tensor, count: int) -> Tensor:
    """Return x (n, ..) as (count, ..), with zeros behind its entries."""
    return x if len(x) == count else torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, count - len(x)))


def deferred_uses(tensor: Tensor) -> dict[DeferredGradient, list[Use]] | None:
    """Return the lists of factors by the function that makes a gradient of them; None if ``tensor`` is not deferred.

    A step that appends factors must return no gradient for ``tensor`` itself.
    """
    return getattr(tensor.grad_fn, "deferred_uses", None)


class _Product(torch.autograd.Function):
    """product(x, factor) with the gradients for_x(gradient, factor) and, at the end, for_factor(factor, uses)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, product: Product, for_x: Product, for_factor: Any) -> Tensor:
        ctx.save_for_backward(x, factor)
        ctx.deferred_uses, ctx.for_x, ctx.for_factor = deferred_uses(factor), for_x, for_factor
        return product(x, factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        x, factor = ctx.saved_tensors
        ctx.deferred_uses[ctx.for_factor].append((x, gradient))
        return ctx.for_x(gradient, factor) if ctx.needs_input_grad[0] else None, None, None, None, None


def _weight_gradient(weight: Tensor, uses: list[Use]) -> Tensor:
    inputs, gradients = zip(*uses, strict=True)
    return torch.cat(gradients).t() @ torch.cat(inputs)


def _matrices_gradient(matrices: Tensor, uses: list[Use]) -> Tensor:
    inputs, gradients = (
        torch.cat([padded(factor, len(matrices)) for factor in factors], dim=1) for factors in zip(*uses, strict=True)
    )
    return torch.bmm(inputs.mT, gradients)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T for x (N, in) and W (out, in)."""
    if deferred_uses(weight) is None:
        return linear_layer(x, weight)
    return _Product.apply(x, weight, linear_layer, torch.matmul, _weight_gradient)


def matmul(x: Tensor, matrices: Tensor) -> Tensor:
    """Return the products (B, R, N) of x (B, R, K) and matrices (B, K, N), image by image."""
    if deferred_uses(matrices) is None:
        return torch.bmm(x, matrices)
    return _Product.apply(x, matrices, torch.bmm, lambda gradient, m: torch.bmm(gradient, m.mT), _matrices_gradient)


class StepLinear(Linear):
    """A linear layer inside a recurrence. Its weight gradient is deferred within ``deferring_weight_gradients``."""

    _deferred: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out) for x (..., in)."""
        if self._deferred is None:
            return super().forward(x)
        weight = self._deferred
        y = linear(x.to(weight.dtype).flatten(0, -2), weight).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias.to(weight.dtype)


@contextmanager
def deferring_weight_gradients(module: nn.Module) -> Iterator[None]:
    """Compute the weight gradient of every ``StepLinear`` in ``module`` once for all steps within the context."""
    layers = [layer for layer in module.modules() if isinstance(layer, StepLinear)]
    try:
        for layer in layers:
            weight = deferred(to_autocast(layer.weight))
            # Assigning a parameter would register it.
            layer._deferred = None if isinstance(weight, nn.Parameter) else weight
        yield
    finally:
        for layer in layers:
            layer._deferred = None
