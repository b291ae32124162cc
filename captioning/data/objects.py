"""Named objects of an image with their masks, which grounding is measured against."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


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
    mask: NDArray[np.bool_]


class ObjectLookup(Protocol):
    """Looks up the objects of an image by the data set's own image id."""

    def __call__(self, image_id: int) -> list[GroundedObject]:
        """Return the objects with masks in the pixels of the image as stored; [] if none are known."""


@contextmanager
def run_lengths() -> Iterator[Any]:
    """Yield pycocotools' functions on run lengths, and silence NumPy 2's warnings about their C code."""
    from pycocotools import mask

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield mask


def outline_of(mask: NDArray[np.bool_]) -> str:
    """Return a mask in COCO's text of run lengths."""
    with run_lengths() as coco:
        encoded = coco.encode(np.asfortranarray(mask, dtype=np.uint8))
    return str(encoded["counts"], "ascii")


def mask_of(outline: str, size: tuple[int, int]) -> NDArray[np.bool_]:
    """Return the mask (height, width) that ``outline_of`` described."""
    with run_lengths() as coco:
        return np.asarray(coco.decode({"size": list(size), "counts": outline})).astype(bool)
