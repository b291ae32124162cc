"""The precision in which this machine computes a model fastest, by what PyTorch says of its devices."""

from __future__ import annotations

import torch

_BFLOAT16 = ("amx_bf16", "avx512_bf16", "avx10_2", "bf16", "sve_bf16")  # the last two are of Arm


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


def has_bfloat16_products() -> bool:
    """Return whether this processor has instructions that multiply bfloat16."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in _BFLOAT16)
