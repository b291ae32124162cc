"""Named objects of an image with their masks, which grounding is measured against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GroundedObject:
    """One object of an image.

    Attributes:
        noun: The object's name in lower case; may be several words ("teddy bear").
        synonyms: Other names that count as naming it, such as plurals.
        attributes: Adjectives that are true of it, one word each.
        mask: (height, width) bool, its visible pixels: in the image as stored when it comes from an ``ObjectLookup``,
            in the model's view when it goes to ``object_cells`` (``Preprocessing.mask`` takes one to the other).
    """

    noun: str
    synonyms: frozenset[str]
    attributes: frozenset[str]
    mask: np.ndarray


ObjectLookup = Callable[[int], list[GroundedObject]]
"""Returns the objects of the image with this number in its data set; [] if none are known."""
