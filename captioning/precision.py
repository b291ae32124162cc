"""Floating-point types: the fastest one on this machine, autocast's, and one that is precise enough."""

import torch
from torch import Tensor

_BFLOAT16 = ("amx_bf16", "avx512_bf16", "avx10_2", "bf16", "sve_bf16")  # the last two are Arm's


def best_precision(accelerator: str = "auto") -> str:
    """Return the precision, as Lightning names it, for one of Lightning's accelerators.

    It is "bf16-mixed" where the device has bfloat16 products, "16-mixed" on older GPUs, and else "32-true": a processor
    without bfloat16 products still multiplies bfloat16, through code that is far slower than float32's.
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"
    if accelerator in ("auto", "gpu", "mps") and torch.backends.mps.is_available():
        return "32-true"
    return "bf16-mixed" if has_bfloat16_products() else "32-true"


def autocast(device: str, precision: str) -> torch.autocast:
    """Return the autocast context for a device, cpu or cuda, and a precision as Lightning names it."""
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    return torch.autocast(device, dtype=dtype, enabled=precision != "32-true")


def has_bfloat16_products() -> bool:
    """Return whether this processor has instructions that multiply bfloat16."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in _BFLOAT16)


def to_autocast(x: Tensor) -> Tensor:
    """Return ``x`` in autocast's type, so that a tensor which every step uses is converted once."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or as it is if its type is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
