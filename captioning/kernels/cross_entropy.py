"""Cross entropy of every step: the plain formula, and a kernel that makes no float32 copy of bfloat16 logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from captioning.kernels import native


def plain_step_nll(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return -log p of the target words in nats, (M,), at least float32. The reference.

    Args:
        logits: (M, V).
        targets: (M,) int64, word ids below V.
        label_smoothing: Fraction of the target probability that is spread evenly over the vocabulary.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)


def step_nll(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return ``plain_step_nll``, by a kernel if there is one for the device and the type."""
    if torch.compiler.is_compiling() or not len(targets) or not native.usable(logits):
        return plain_step_nll(logits, targets, label_smoothing)
    smallest, largest = (int(bound) for bound in targets.aminmax())
    if smallest < 0 or largest >= logits.shape[1]:
        raise IndexError(f"targets must be in [0, {logits.shape[1]}), got {smallest} to {largest}")
    return _StepNLL.apply(logits, targets, label_smoothing)


class _StepNLL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
        logits, targets = logits.contiguous(), targets.contiguous()
        smoothing = torch.tensor([label_smoothing], dtype=torch.float32)
        M, V = logits.shape
        nll, lse = (torch.empty(M, dtype=torch.float32) for _ in range(2))
        native.call("cross_entropy_forward", logits.dtype, logits, targets, smoothing, nll, lse, M, V)
        ctx.save_for_backward(logits, targets, smoothing, lse)
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, smoothing, lse = ctx.saved_tensors
        for_logits = torch.empty_like(logits)
        arguments = (logits, targets, smoothing, lse, gradient.float().contiguous(), for_logits)
        native.call("cross_entropy_backward", logits.dtype, *arguments, *logits.shape)
        return for_logits, None, None
