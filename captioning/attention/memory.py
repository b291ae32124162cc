"""The annotations of a batch, prepared once for all steps, and functions that make contexts and repeat rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from captioning.attention.scores import dot
from captioning.precision import at_least_float32


@dataclass(frozen=True)
class Memory:
    """The annotations of B images. N = B * R rows look at them; the rows of an image are adjacent.

    Attributes:
        annotations: (B, L, D).
        projected: The score's projection of the annotations, usually (B, L, A) or (B, A, L). If no score reads
            it, the annotations.
        mask: (B, L) bool, True where a location exists; None when all do.
        drawn: (B,) bool, True for images whose contexts are drawn in this batch, False for images whose contexts are
            expectations (Sec. 4.1). None in evaluation, and for attention that never draws.
        inner: The memories of a transformer's layers; or the one memory of multi-head attention, (B * heads, ..), in
            which every head is an image of its own. The heads of an image are adjacent.
    """

    annotations: Tensor
    projected: Tensor
    mask: Tensor | None = None
    drawn: Tensor | None = None
    inner: tuple["Memory", ...] = ()

    @property
    def exists(self) -> Tensor:
        """(B, L) bool, True where a location exists."""
        if self.mask is not None:
            return self.mask
        return torch.ones(self.annotations.shape[:2], dtype=torch.bool, device=self.annotations.device)

    def mean_annotation(self) -> Tensor:
        """Return the mean annotation over the locations that exist, (B, D)."""
        exists = at_least_float32(self.exists.to(self.annotations.dtype))
        weights = exists / exists.sum(dim=1, keepdim=True)  # (B, L)
        return expected_context(weights.unsqueeze(1), self.annotations).squeeze(1)

    def select_images(self, images: Tensor) -> Self:
        """Return the memory of the images at these indices, (B',), with all heads of each image in ``inner``."""
        B = len(self.annotations)
        return self.map(lambda field: field.unflatten(0, (B, -1)).index_select(0, images).flatten(0, 1))

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with ``function`` applied to every tensor, also in ``inner``."""

        def apply(field: Any) -> Any:
            if isinstance(field, tuple):
                return tuple(memory.map(function) for memory in field)
            return None if field is None else function(field)

        return type(self)(**{name: apply(field) for name, field in vars(self).items()})


def expected_context(weights: Tensor, annotations: Tensor) -> Tensor:
    """Return sum_i w_i a_i for weights (B, R, L) and annotations (B, L, D) as (B, R, D)."""
    return dot(weights, annotations)


def repeat_rows(x: Tensor, n: int) -> Tensor:
    """Return (N, ..) as (N * n, ..); the copies of a row are adjacent."""
    return x if n == 1 else x.unsqueeze(1).expand(-1, n, *x.shape[1:]).flatten(0, 1)
