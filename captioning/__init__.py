"""Show, Attend and Tell (Xu et al., ICML 2015) in PyTorch: soft and hard attention over image regions."""

from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"
__all__ = ["load"]

if TYPE_CHECKING:
    from captioning.inference import load


def __getattr__(name: str) -> Any:
    """Import ``load`` when it is used, because it imports torch."""
    if name == "load":
        from captioning.inference import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
