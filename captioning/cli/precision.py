"""The precision of a run: what ``auto`` is on this machine."""

from __future__ import annotations

from typing import Any

from captioning.kernels.machine import best_precision


def settled_precision(trainer: Any) -> tuple[Any, str | None]:
    """Return the precision that a run computes in, and the line that it says about it, if any.

    Args:
        trainer: The trainer's settings. ``auto`` is replaced; a precision that somebody asked for is taken.
    """
    if trainer.precision != "auto":
        return trainer.precision, None
    precision = best_precision(str(trainer.accelerator))
    return precision, f"precision: {precision}"
