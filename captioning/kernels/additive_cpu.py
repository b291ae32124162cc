"""The additive score and its gradients in C (``native/additive.c``). Letters as in ``additive``."""

from __future__ import annotations

import torch
from torch import Tensor

from captioning.kernels import native


def usable(projected: Tensor) -> bool:
    """Return whether the kernels support this tensor's device and type."""
    return native.usable(projected)


def forward(projected: Tensor, query: Tensor, weight: Tensor) -> Tensor:
    """Return e (B, R, L)."""
    (B, L, A), R = projected.shape, query.shape[1]
    logits, scratch = torch.empty(B, R, L, dtype=torch.float32), _scratch(1, R, A)
    arguments = (projected, query.float(), weight, logits, scratch)
    native.call("additive_forward", projected.dtype, *arguments, scratch.shape[1], B, R, L, A)
    return logits


def backward(projected: Tensor, query: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and v, given the gradient of e at one step."""
    (B, L, A), R = projected.shape, query.shape[1]
    for_query, scratch = torch.empty(B, R, A, dtype=torch.float32), _scratch(1, R, A)
    for_weight = torch.zeros(native.threads(), A, dtype=torch.float32)
    arguments = (projected, query.float(), weight, gradient, for_query, for_weight, scratch)
    native.call("additive_backward", projected.dtype, *arguments, scratch.shape[1], B, R, L, A)
    return for_query.to(query.dtype), for_weight.sum(dim=0)


def backward_projected(
    projected: Tensor, queries: tuple[Tensor, ...], weight: Tensor, gradients: tuple[Tensor, ...]
) -> Tensor:
    """Return the gradient of P, given q and the gradient of e at all steps, each of the first images alone."""
    (B, L, A), R, T = projected.shape, queries[0].shape[1], len(queries)
    queries = tuple(query.float() for query in queries)
    for_projected, scratch = torch.empty_like(projected), _scratch(T, R, A)
    images = torch.tensor([len(query) for query in queries], dtype=torch.int64)
    factors = (native.pointers(queries), weight, native.pointers(gradients), images)
    arguments = (projected, *factors, for_projected, scratch)
    native.call("additive_backward_projected", projected.dtype, *arguments, scratch.shape[1], T, B, R, L, A)
    return for_projected


def _scratch(T: int, R: int, A: int) -> Tensor:
    """Return working memory for all threads, laid out as ``Scratch`` in ``native/additive.c``."""
    return torch.empty(native.threads(), (5 + (T + 2) * R) * (-(-A // 64) * 64), dtype=torch.float32)
