"""Named objects of an image with their masks, which grounding is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class GroundedObject:
    """One object of an image.

    Attributes:
        noun: what it is called, lower case; may be several words ("teddy bear").
        synonyms: other names that count as naming it (plurals, say).
        attributes: adjectives that are true of it, one word each.
        mask: (height, width) bool, its visible pixels: in the image as stored when it comes from an ``ObjectLookup``,
            in the model's view when it goes to ``object_cells`` (``Preprocessing.mask`` takes one to the other).
        decoys: longer phrases that hold one of the names and mean something else ("hot dog", for a dog).
    """

    noun: str
    synonyms: frozenset[str]
    attributes: frozenset[str]
    mask: NDArray[np.bool_]
    decoys: frozenset[str] = frozenset()


class ObjectLookup(Protocol):
    """Looks up the objects of an image by the data set's own image id."""

    def __call__(self, image_id: int) -> list[GroundedObject]:
        """Return the objects with masks in the pixels of the image as stored; [] if none are known."""
