"""Gradients of tensors that every step of a recurrence uses, computed once at the end of the backward pass.

The gradient of a weight that T steps use is a sum of T small products. Autograd computes and adds them one by one.
Here the steps store their factors, and one large product at the end gives the same sum:

    weight = defer_gradient(weight)
    for x in steps:
        y = linear(x, weight)

A tensor that was not passed to ``defer_gradient``, or that needs no gradient, takes the ordinary path of autograd.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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


def defer_gradient(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with lists in which steps store the factors of its gradient."""
    return _Defer.apply(tensor) if tensor.requires_grad and torch.is_grad_enabled() else tensor


def deferred_uses(tensor: Tensor) -> dict[DeferredGradient, list[Use]] | None:
    """Return the factors that steps have stored for ``tensor``, by the function that computes its gradient from them.

    None if ``tensor`` is not deferred. A step that appends factors must return no gradient for ``tensor`` itself.
    """
    return getattr(tensor.grad_fn, "deferred_uses", None)


class _TakeFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, count: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.deferred_uses = deferred_uses(tensor)
        ctx.count = len(tensor)
        return tensor[:count]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return None if gradient is None else pad_rows(gradient, ctx.count), None


def take_first(tensor: Tensor, count: int) -> Tensor:
    """Return the first ``count`` entries of ``tensor``. Steps that use these store their factors with ``tensor``."""
    return tensor[:count] if deferred_uses(tensor) is None else _TakeFirst.apply(tensor, count)


def pad_rows(x: Tensor, count: int) -> Tensor:
    """Return x (n, ..) as (count, ..), with zeros behind its entries."""
    return x if len(x) == count else torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, count - len(x)))


class _Product(torch.autograd.Function):
    """product(x, shared); gradients: x_gradient(gradient, shared) and, at the end, shared_gradient(shared, uses)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shared: Tensor, product: Product, x_gradient: Product, shared_gradient: Any
    ) -> Tensor:
        ctx.save_for_backward(x, shared)
        ctx.deferred_uses = deferred_uses(shared)
        ctx.x_gradient, ctx.shared_gradient = x_gradient, shared_gradient
        return product(x, shared)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        x, shared = ctx.saved_tensors
        ctx.deferred_uses[ctx.shared_gradient].append((x, gradient))
        return ctx.x_gradient(gradient, shared) if ctx.needs_input_grad[0] else None, None, None, None, None


deferred_product: Callable[..., Tensor] = _Product.apply
