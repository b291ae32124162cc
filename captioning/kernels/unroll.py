"""Gradients of tensors that every step of a recurrence uses, computed once at the end of the backward pass.

The gradient of a weight that T steps use is a sum of T small products. Autograd computes and adds them one by one.
Here the steps store their factors, and one large product at the end gives the same sum:

    weight = collected(weight)
    for x in steps:
        y = linear(x, weight)

A tensor that was not collected, or that needs no gradient, takes the ordinary path of autograd.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from captioning.kernels.linear import Linear
from captioning.kernels.linear import linear as linear_layer

Use = tuple[Tensor, ...]
CollectedGradient = Callable[[Tensor, list[Use]], Tensor]
"""Called with the collected tensor and the factors that the steps stored; returns the tensor's gradient."""


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        ctx.set_materialize_grads(False)
        ctx.uses = defaultdict(list)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        """Runs after the backward pass of all steps, because every step uses this node's output."""
        (tensor,) = ctx.saved_tensors
        for collected_gradient, uses in ctx.uses.items():
            sum_over_steps = collected_gradient(tensor, uses)
            gradient = sum_over_steps if gradient is None else gradient + sum_over_steps
        ctx.uses.clear()
        return gradient


def collected(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with a list in which steps store the factors of its gradient."""
    if tensor.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _Collect.apply(tensor)
    return tensor


class _Leading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, count: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.uses, ctx.missing = uses_of(tensor), len(tensor) - count
        return tensor[:count]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return None if gradient is None else padded(gradient, len(gradient) + ctx.missing), None


def leading(tensor: Tensor, count: int) -> Tensor:
    """Return the first ``count`` entries of ``tensor``; steps that use them store their factors with ``tensor``."""
    return tensor[:count] if uses_of(tensor) is None else _Leading.apply(tensor, count)


def padded(x: Tensor, count: int) -> Tensor:
    """Return x (n, ..) as (count, ..), with zeros behind its entries."""
    return x if len(x) == count else torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, count - len(x)))


def uses_of(tensor: Tensor) -> dict[CollectedGradient, list[Use]] | None:
    """Return the lists of factors by the function that makes a gradient of them; None if ``tensor`` is not collected.

    A step that appends factors must return no gradient for ``tensor`` itself.
    """
    return None if torch.compiler.is_compiling() else getattr(tensor.grad_fn, "uses", None)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.uses = uses_of(weight)
        return linear_layer(x, weight, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        x, weight = ctx.saved_tensors
        ctx.uses[_linear_weight_gradient].append((x, gradient))
        return gradient @ weight if ctx.needs_input_grad[0] else None, None


def _linear_weight_gradient(weight: Tensor, uses: list[Use]) -> Tensor:
    inputs, gradients = zip(*uses, strict=True)
    return torch.cat(gradients).t() @ torch.cat(inputs)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T for x (N, in) and W (out, in)."""
    return linear_layer(x, weight, None) if uses_of(weight) is None else _Linear.apply(x, weight)


class _MatMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrices)
        ctx.uses = uses_of(matrices)
        return torch.bmm(x, matrices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        x, matrices = ctx.saved_tensors
        ctx.uses[_matrices_gradient].append((x, gradient))
        return torch.bmm(gradient, matrices.mT) if ctx.needs_input_grad[0] else None, None


def _matrices_gradient(matrices: Tensor, uses: list[Use]) -> Tensor:
    inputs, gradients = (
        torch.cat([padded(factor, len(matrices)) for factor in factors], dim=1) for factors in zip(*uses, strict=True)
    )
    return torch.bmm(inputs.mT, gradients)


def matmul(x: Tensor, matrices: Tensor) -> Tensor:
    """Return the products (B, R, N) of x (B, R, K) and matrices (B, K, N), image by image."""
    return torch.bmm(x, matrices) if uses_of(matrices) is None else _MatMul.apply(x, matrices)


class StepLinear(Linear):
    """A linear layer inside a recurrence; within ``unrolled`` its weight gradient is collected over all steps."""

    _collected: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out) for x (..., in)."""
        if self._collected is None:
            return super().forward(x)
        weight = self._collected
        y = linear(x.to(weight.dtype).flatten(0, -2), weight).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias.to(weight.dtype)


@contextmanager
def unrolled(module: nn.Module) -> Iterator[None]:
    """Collect the weight gradients of every ``StepLinear`` in ``module`` over the steps within the context."""
    layers = [layer for layer in module.modules() if isinstance(layer, StepLinear)]
    try:
        for layer in layers:
            weight, device = layer.weight, layer.weight.device.type
            if torch.is_autocast_enabled(device):
                weight = weight.to(torch.get_autocast_dtype(device))
            weight = collected(weight)
            # Assigning a parameter would register it.
            layer._collected = None if isinstance(weight, nn.Parameter) else weight
        yield
    finally:
        for layer in layers:
            layer._collected = None
