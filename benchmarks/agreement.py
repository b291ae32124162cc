"""Two kernels against their plain formulas, on the device that is measured: the benchmark times no wrong numbers."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from captioning.errors import InputError
from captioning.kernels.products import additive_logits, plain_additive_logits
from captioning.kernels.summed import plain_summed_log_probs, summed_log_probs

Call = Callable[..., Tensor]


class KernelSizes(NamedTuple):
    """B images with R rows each, T steps of an image, L locations, hidden sizes A and E, V words."""

    B: int = 3
    R: int = 2
    T: int = 2
    L: int = 49
    A: int = 130
    E: int = 8
    V: int = 501


_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def check(device: torch.device) -> None:
    """Compare the results and gradients of all kernels with those of their formulas.

    Raises:
        InputError: A kernel differs. The message names the kernel and its error.
    """
    for dtype, tolerance in _TOLERANCE.items():
        for name, (kernel, formula, inputs) in kernels(dtype, device, KernelSizes()).items():
            ours = result_and_gradients(kernel, [x.to(device) for x in inputs])
            plain = result_and_gradients(formula, [x.to(device, torch.float32) for x in inputs])
            error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, plain, strict=True))
            if not error <= tolerance:
                raise InputError(
                    f"benchmarks: on {device} in {str(dtype)[6:]}, the kernel of the {name} differs from its "
                    f"plain formula by {error:.1e}; {tolerance:.0e} is allowed, so nothing was measured"
                )


def kernels(dtype: torch.dtype, device: torch.device, sizes: KernelSizes) -> dict[str, tuple[Call, Call, list[Tensor]]]:
    """Return every kernel by name, with its plain formula and inputs of type ``dtype``."""
    torch.manual_seed(0)
    B, R, T, L, A, E, V = sizes
    P, q, v = torch.randn(B, L, A, dtype=dtype), torch.randn(B, R, A), torch.randn(A) / A**0.5
    Q, log_w = torch.randn(B * T, V), torch.randn(B * T, L + 1).log_softmax(-1)
    C, W = torch.randn(B, L, E, dtype=dtype) / 3, torch.randn(V, E, dtype=dtype) / 3
    images = torch.arange(B, device=device).repeat_interleave(T)
    return {
        "additive score": (additive_logits, plain_additive_logits, [P, q, v]),
        "summed likelihood": (
            lambda Q, C, W, log_w: summed_log_probs(Q, C, W, log_w, images),
            lambda Q, C, W, log_w: plain_summed_log_probs(Q, (C @ W.t())[images], log_w),
            [Q, C, W, log_w],
        ),
    }


def result_and_gradients(call: Call, inputs: list[Tensor]) -> list[Tensor]:
    """Return what a kernel computes, and its gradients with respect to all inputs, in float32."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    result = call(*inputs)
    weights = torch.linspace(-1, 1, result.numel(), device=result.device).view_as(result)
    gradients = torch.autograd.grad((result.float() * weights).sum(), inputs)
    return [result.detach().float(), *(gradient.float() for gradient in gradients)]
