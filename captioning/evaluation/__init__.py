"""How good captions are and where attention looks: an evaluator over batches, and its records."""

from __future__ import annotations

from typing import Any

__all__ = ["evaluate"]


def __getattr__(name: str) -> Any:
    """Import ``evaluate`` when it is used, because it imports torch."""
    if name == "evaluate":
        from captioning.evaluation.evaluator import evaluate

        return evaluate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
