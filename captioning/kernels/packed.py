"""The steps of captions of different lengths without their padding: what does not exist costs nothing."""

from __future__ import annotations

import torch
from torch import Tensor


class Packed:
    """The steps of N captions that exist, one caption after the other: M of N * T.

    Args:
        captions: (N, T+1) int64, ``<start> w_1 .. <end> <pad> ..``.
        lengths: (N,) int64, steps of each caption: its words and <end>.

    Attributes:
        mask: (N, T) bool, True where a step exists.
        targets: (M,) int64, the words of the captions.
    """

    def __init__(self, captions: Tensor, lengths: Tensor) -> None:
        if captions.ndim != 2 or lengths.shape != captions.shape[:1]:
            raise ValueError(f"captions must be (N, T+1), lengths (N,); got {captions.shape} and {lengths.shape}")
        self.mask = torch.arange(captions.shape[1] - 1, device=captions.device) < lengths.unsqueeze(1)
        self._index = self.mask.flatten().nonzero().squeeze(1)  # (M,), positions among all N * T
        self.targets = self.pack(captions[:, 1:])

    def pack(self, steps: Tensor) -> Tensor:
        """Return (M, ..) of (N, T, ..)."""
        return steps.flatten(0, 1).index_select(0, self._index)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return (M, ..) as (N, T, ..), 0 at steps that do not exist."""
        zeros = packed.new_zeros(self.mask.numel(), *packed.shape[1:])
        return zeros.index_copy(0, self._index, packed).unflatten(0, self.mask.shape)

    def images(self, B: int) -> Tensor:
        """Return (M,) int64, the image of each step; captions must be grouped by image, equally many for each."""
        return self._index // (self.mask.numel() // B)
