"""The additive score and its gradients in Triton, for GPUs. Letters as in ``kernels.products``.

A program holds a tile of locations by hidden units in registers; tanh is never stored. Sums are taken in float32 and in
a fixed order, without atomic operations, so that a run can be repeated exactly. The module is only imported for tensors
on a GPU, because importing Triton is slow.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TYPES = (torch.float32, torch.bfloat16, torch.float16)

_log = logging.getLogger(__name__)


@triton.jit
def _tanh(x):
    # Within 2e-7 of tanh everywhere; 2.885 = 2 / ln 2. The power may become infinite, and the quotient is 0 then.
    return 1.0 - 2.0 / (tl.exp2(2.8853900817779268 * x) + 1.0)


@triton.jit(do_not_specialize=["R"])
def _forward(P, q, v, e, R, L, A: tl.constexpr, LOCATIONS: tl.constexpr, UNITS: tl.constexpr):
    """Write e of one row and a block of locations. The rows of an image run side by side and find P in the cache."""
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(L, LOCATIONS)
    image = program // (blocks * R)
    row = image * R + program % R
    i = (program // R) % blocks * LOCATIONS + tl.arange(0, LOCATIONS)
    terms = tl.zeros((LOCATIONS, UNITS), tl.float32)
    for start in range(0, A, UNITS):
        a = start + tl.arange(0, UNITS)
        position = (image * L + i)[:, None] * A + a[None, :]
        x = tl.load(P + position, mask=(i < L)[:, None] & (a < A)[None, :], other=0.0).to(tl.float32)
        x += tl.load(q + row * A + a, mask=a < A, other=0.0).to(tl.float32)[None, :]
        terms += tl.load(v + a, mask=a < A, other=0.0)[None, :] * _tanh(x)
    tl.store(e + row * L + i, tl.sum(terms, axis=1), mask=i < L)


@triton.jit
def _backward(P, q, v, g, dq, dv, R, L, A: tl.constexpr, LOCATIONS: tl.constexpr, UNITS: tl.constexpr):
    """Write dq of one row and a block of hidden units, and what the row adds to dv."""
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(A, UNITS)
    row = program // blocks
    image = row // R
    a = program % blocks * UNITS + tl.arange(0, UNITS)
    y = tl.load(q + row * A + a, mask=a < A, other=0.0).to(tl.float32)[None, :]
    dq_terms = tl.zeros((LOCATIONS, UNITS), tl.float32)
    dv_terms = tl.zeros((LOCATIONS, UNITS), tl.float32)
    for start in range(0, L, LOCATIONS):
        i = start + tl.arange(0, LOCATIONS)
        position = (image * L + i)[:, None] * A + a[None, :]
        x = tl.load(P + position, mask=(i < L)[:, None] & (a < A)[None, :], other=0.0).to(tl.float32)
        gradient = tl.load(g + row * L + i, mask=i < L, other=0.0)[:, None]
        hidden = _tanh(x + y)
        dv_terms += gradient * hidden
        dq_terms += gradient * (1.0 - hidden * hidden)
    weight = tl.load(v + a, mask=a < A, other=0.0)
    tl.store(dq + row * A + a, weight * tl.sum(dq_terms, axis=0), mask=a < A)
    tl.store(dv + row * A + a, tl.sum(dv_terms, axis=0), mask=a < A)


@triton.jit(do_not_specialize=["T", "B", "R"])
def _backward_projected(P, q, v, g, dP, T, B, R, L, A: tl.constexpr, LOCATIONS: tl.constexpr, UNITS: tl.constexpr):
    """Write a tile of dP. The tile of P stays in registers while q (T, B, R, A) and g (T, B, R, L) stream past."""
    program = tl.program_id(0).to(tl.int64)
    across, down = tl.cdiv(A, UNITS), tl.cdiv(L, LOCATIONS)
    image = program // (across * down)
    i = (program // across) % down * LOCATIONS + tl.arange(0, LOCATIONS)
    a = program % across * UNITS + tl.arange(0, UNITS)
    position = (image * L + i)[:, None] * A + a[None, :]
    exists = (i < L)[:, None] & (a < A)[None, :]
    x = tl.load(P + position, mask=exists, other=0.0).to(tl.float32)
    dP_terms = tl.zeros((LOCATIONS, UNITS), tl.float32)
    for t in range(T):
        for r in range(R):
            row = (t * B + image) * R + r
            y = tl.load(q + row * A + a, mask=a < A, other=0.0).to(tl.float32)[None, :]
            gradient = tl.load(g + row * L + i, mask=i < L, other=0.0)[:, None]
            hidden = _tanh(x + y)
            dP_terms += gradient * (1.0 - hidden * hidden)
    weight = tl.load(v + a, mask=a < A, other=0.0)[None, :]
    tl.store(dP + position, weight * dP_terms, mask=exists)


def supports(projected: Tensor) -> bool:
    """Return whether the kernels support this tensor's device and type."""
    return projected.is_cuda and projected.dtype in _TYPES and _compiles(projected.device)


@functools.cache
def _compiles(device: torch.device) -> bool:
    """Return whether Triton compiles for the device; if not, log why."""
    try:
        ones = torch.ones(1, 1, 1, device=device)
        forward(ones, ones, ones[0, 0])
    except Exception as error:  # from Triton, the driver, or the C compiler that Triton calls
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        _log.warning("no Triton kernels, the decoder runs on PyTorch's operations, which is slower: %s", reason)
        return False
    return True


def forward(projected: Tensor, query: Tensor, weight: Tensor) -> Tensor:
    """Return e (B, R, L)."""
    (B, L, A), R = projected.shape, query.shape[1]
    logits = torch.empty(B, R, L, dtype=torch.float32, device=projected.device)
    locations, units = 16, min(256, triton.next_power_of_2(A))
    programs = B * R * triton.cdiv(L, locations)
    _launch(_forward, programs, projected, query, weight, logits, R, L, A, locations, units)
    return logits


def backward(projected: Tensor, query: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and v, given the gradient of e at one step."""
    (B, L, A), R = projected.shape, query.shape[1]
    dq, dv = torch.empty_like(query), torch.empty(B * R, A, dtype=torch.float32, device=projected.device)
    locations, units = 32, min(64, triton.next_power_of_2(A))
    arguments = (projected, query, weight, gradient, dq, dv, R, L, A, locations, units)
    _launch(_backward, B * R * triton.cdiv(A, units), *arguments)
    return dq, dv.sum(dim=0)


def backward_projected(
    projected: Tensor, queries: tuple[Tensor, ...], weight: Tensor, gradients: tuple[Tensor, ...]
) -> Tensor:
    """Return the gradient of P, given q and the gradient of e at all steps, with one launch."""
    (B, L, A), R, T = projected.shape, queries[0].shape[1], len(queries)
    dP = torch.empty_like(projected)
    locations, units = 16, min(128, triton.next_power_of_2(A))
    programs = B * triton.cdiv(L, locations) * triton.cdiv(A, units)
    arguments = (projected, torch.stack(queries), weight, torch.stack(gradients), dP)
    _launch(_backward_projected, programs, *arguments, T, B, R, L, A, locations, units)
    return dP


def _launch(kernel: Any, programs: int, projected: Tensor, *arguments: Tensor | int) -> None:
    with torch.cuda.device_of(projected):  # Triton launches on the current device; 3.9 warns without enable_fp_fusion
        kernel[(programs,)](projected, *arguments, enable_fp_fusion=True)
