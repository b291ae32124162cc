"""Features of mirrored images, and which images of an epoch are seen mirrored."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from captioning.data.features.reading import FeatureCache
from captioning.errors import InputError


def flipped_split(split: str) -> str:
    """Return the name that the features of a split's mirrored images are kept under."""
    return f"{split}_flipped"


class FlippedFeatures:
    """The mirrored side of a split, and which images of an epoch are seen from there.

    An image has one side for all its captions of an epoch, as a function of seed, epoch and image alone: a resumed run
    goes on with the same sides, whichever process or thread reads them.

    Args:
        cache: of the mirrored images.
        probability: that an image is mirrored in an epoch.
        seed: of the choice.
        images: N of the split, in the order of its ``CaptionIndex``.
    """

    def __init__(self, cache: FeatureCache, *, probability: float, seed: int, images: int) -> None:
        if not 0 <= probability <= 1:
            raise InputError(f"flip must be a probability, got {probability}")
        self.cache = cache
        self.probability = probability
        self.seed = seed
        self.images = images
        self._chosen: tuple[int, Tensor] | None = None

    def chosen(self, epoch: int) -> Tensor:
        """Return (N,) bool, True for images that are mirrored in the epoch."""
        known = self._chosen  # read once: threads share this object
        if known is None or known[0] != epoch:
            drawn = np.random.default_rng((self.seed, epoch, 1)).random(self.images)  # the batches draw without the 1
            known = self._chosen = (epoch, torch.from_numpy(drawn < self.probability))
        return known[1]
