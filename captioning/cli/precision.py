"""The precision of a run: what ``auto`` is on this machine, and what another one costs here."""

from __future__ import annotations

from typing import Any

import torch

from captioning.kernels.machine import chosen_precision, cost_of_precision


def settled_precision(trainer: Any) -> tuple[Any, str | None]:
    """Return the precision that a run computes in, and the line that it says about it, if any.

    Args:
        trainer: The trainer's settings. ``auto`` is replaced; a precision that somebody asked for is taken.
    """
    device = _device(str(trainer.accelerator))
    if trainer.precision == "auto":
        return chosen_precision(device)
    return trainer.precision, cost_of_precision(str(trainer.precision), device)


def _device(accelerator: str) -> str:
    """Return the kind of device that Lightning takes for an accelerator."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "cuda"
    if accelerator in ("auto", "gpu", "mps") and torch.backends.mps.is_available():
        return "mps"
    return "cpu"
