"""Element-wise operations on logits (.., V) for the mixture over locations: the plain formulas, and a kernel for each.

``captioning.kernels.marginal`` defines the quantities, and computes the matrix products between these operations. Rows
(.., V) have the type of the products; sums and logarithms are at least float32.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from captioning.kernels import native

SMALLEST = 1e-15
"""Smaller totals are replaced by this value; such steps are computed by the plain formula."""


def precise(*tensors: Tensor) -> torch.dtype:
    """Return the widest of the tensors' types and float32."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def exponentials(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Fill ``out`` (.., V), which may be ``x``, with exp(x) divided by each row's largest value.

    Returns:
        The logarithm of each row's divisor, and each row's sum, (..,).
    """
    if _usable(x, out):
        shift, sums = (torch.empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
        native.call("mixture_exponentials", x.dtype, x, out, shift, sums, *_rows(x))
        return shift, sums
    values = x.to(precise(x, out))
    shift = values.amax(-1)
    values = (values - shift.unsqueeze(-1)).exp_()
    out.copy_(values)
    return shift, values.sum(-1)


def log_probs(s: Tensor, shift: Tensor, mixed: Tensor, no_look: Tensor, out: Tensor) -> Tensor:
    """Fill ``out`` (.., V) with s - shift + log(mixed + no_look).

    Args:
        s: (.., V).
        mixed: (.., V), the sum over the locations.
        no_look: (..,), the summand of component 0, equal for all words.

    Returns:
        The smallest mixed + no_look of each row, (..,).
    """
    if _usable(s, mixed) and out.dtype == torch.float32:
        least = torch.empty(shift.shape, dtype=torch.float32)
        shift, no_look = shift.contiguous(), no_look.contiguous()
        native.call("mixture_log_probs", s.dtype, s, mixed, no_look, shift, out, least, *_rows(s))
        return least
    total = mixed.to(out.dtype) + no_look.unsqueeze(-1)
    torch.add(s.to(out.dtype) - shift.unsqueeze(-1), total.clamp(min=SMALLEST).log(), out=out)
    return total.amin(-1)


def ratios(q: Tensor, mixed: Tensor, no_look: Tensor) -> tuple[Tensor, Tensor]:
    """Return q / (mixed + no_look) (.., V) in the type of ``mixed``, and the sum of each row (..,)."""
    if _usable(mixed) and q.dtype == torch.float32 and q.is_contiguous():
        out, sums = torch.empty_like(mixed), torch.empty(mixed.shape[:-1], dtype=torch.float32)
        no_look = no_look.contiguous()
        native.call("mixture_ratios", mixed.dtype, q, mixed, no_look, out, sums, *_rows(mixed))
        return out, sums
    quotients = q / (mixed.to(q.dtype) + no_look.unsqueeze(-1)).clamp_(min=SMALLEST)
    return quotients.to(mixed.dtype), quotients.sum(-1)


def logits_gradient(q: Tensor, mixed: Tensor, no_look: Tensor, e: Tensor, out: Tensor) -> None:
    """Fill ``out`` (.., V) with q + (mixed - no_look) e."""
    if _usable(mixed, e, out) and q.dtype == torch.float32 and q.is_contiguous():
        no_look = no_look.contiguous()
        native.call("mixture_gradient", mixed.dtype, q, mixed, no_look, e, out, *_rows(mixed))
    else:
        out.copy_((mixed - no_look.unsqueeze(-1)).mul_(e).add_(q))


def _usable(*rows: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False
    alike = all(tensor.dtype == rows[0].dtype and tensor.is_contiguous() for tensor in rows)
    return alike and rows[0].numel() > 0 and native.usable(rows[0])


def _rows(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]
