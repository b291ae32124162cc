"""The additive score and its gradients in C (``native/additive.c``). Letters as in ``additive``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from captioning.kernels import native

_VECTOR = 16  # numbers of the longest vector
_exponentials = WeakTensorKeyDictionary()  # of P: its version, and e^2P


def usable(projected: Tensor) -> bool:
    """Return whether the kernels support this tensor's device and type."""
    return native.usable(projected)


def forward(projected: Tensor, query: Tensor, weight: Tensor) -> Tensor:
    """Return e (B, R, L)."""
    (B, L, A), R = projected.shape, query.shape[1]
    logits, scratch = torch.empty(B, R, L, dtype=torch.float32), _scratch(1, R, A)
    arguments = (projected, _exponential(projected), query.float(), weight, logits, scratch)
    native.call("additive_forward", projected.dtype, *arguments, scratch.shape[1], B, R, L, A)
    return logits


def backward(projected: Tensor, query: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and v, given the gradient of e at one step."""
    (B, L, A), R = projected.shape, query.shape[1]
    for_query, scratch = torch.empty(B, R, A, dtype=torch.float32), _scratch(1, R, A)
    for_weight = torch.zeros(native.threads(), A, dtype=torch.float32)
    gradients = (gradient, for_query, for_weight)
    arguments = (projected, _exponential(projected), query.float(), weight, *gradients, scratch)
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


def _exponential(projected: Tensor) -> Tensor | None:
    """Return e^2P of float32 P, computed once for all steps that pass the same tensor or its first images.

    Returns None for bfloat16, where e^2P in float32 would take twice the memory of P, and reading P is what a step
    waits for. Returns None also if A is no multiple of a vector. The kernels then compute e^2P at every step. In
    inference mode, tensors have no versions and views no base: P must not be changed in place there, and e^2P of its
    first images is computed anew.
    """
    if projected.dtype is not torch.float32 or projected.shape[-1] % _VECTOR:
        return None
    whole = projected._base
    if whole is None or not whole.is_contiguous() or whole.data_ptr() != projected.data_ptr():
        whole = projected
    version = None if whole.is_inference() else whole._version
    known = _exponentials.get(whole)
    if known is None or known[0] != version:
        exponential = torch.empty_like(whole)
        native.call("additive_exponentials", whole.dtype, whole, exponential, whole.numel())
        known = _exponentials[whole] = (version, exponential)  # once it is filled: other threads may ask for it
    return known[1]


def _scratch(T: int, R: int, A: int) -> Tensor:
    """Return working memory for all threads, laid out as ``Scratch`` in ``native/additive.c``."""
    return torch.empty(native.threads(), (5 + (T + 2) * R) * (-(-A // 64) * 64), dtype=torch.float32)
