"""Named objects of an image with their masks, which grounding is measured against, and their outlines in files."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from captioning.data.images import MAX_PIXELS
from captioning.errors import InputError

_OVERSHOOT = 2  # image sizes that a polygon may reach outside; annotators overshoot by some pixels


@dataclass(frozen=True)
class GroundedObject:
    """One object of an image.

    Attributes:
        noun: The object's name in lower case; may be several words ("teddy bear").
        synonyms: Other names that count as naming it, such as plurals.
        attributes: Adjectives that are true of it, one word each.
        mask: (height, width) bool, its visible pixels: in the image as stored when it comes from an ``ObjectLookup``,
            in the model's view when it goes to ``object_cells`` (``Preprocessing.mask`` takes one to the other).
        decoys: Longer phrases that contain one of the names and mean something else ("hot dog", for a dog).
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


def check_outline(outline: Any, height: Any, width: Any) -> None:
    """Refuse an outline that is damaged or would take more memory to draw than its image.

    Args:
        outline: The ``segmentation`` of an object: polygons, or run lengths as a list or in COCO's text.
        height, width: Size of the image in pixels.

    Raises:
        InputError: Says what is wrong, without the file and object.
    """
    if not all(type(side) is int and side > 0 for side in (height, width)) or height * width > MAX_PIXELS:
        raise InputError(f"its image is {height} x {width} pixels, not a size of at most {MAX_PIXELS:,} pixels")
    if isinstance(outline, list):
        limit = _OVERSHOOT * max(height, width)
        for polygon in outline:
            if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
                raise InputError("its polygon is no list of x, y of three or more points")
            if not all(isinstance(value, (int, float)) and abs(value) <= limit for value in polygon):  # NaN: False
                raise InputError(f"its polygon leaves its image of {height} x {width} pixels")
    elif isinstance(outline, dict):
        counts = outline.get("counts")
        if outline.get("size") != [height, width]:
            raise InputError(f"its run lengths are of size {outline.get('size')!r}, its image of {[height, width]}")
        runs = counts if isinstance(counts, list) else _runs(counts)
        if not all(type(run) is int and run >= 0 for run in runs) or sum(runs) != height * width:
            raise InputError(f"its run lengths do not add up to its image of {height} x {width} pixels")
    else:
        raise InputError("its outline is neither polygons nor run lengths")


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
    """Return the mask (height, width) that ``outline_of`` described.

    Raises:
        InputError: The outline is damaged.
    """
    height, width = size
    check_outline({"size": [height, width], "counts": outline}, height, width)
    runs = _runs(outline)
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(width, height).T


def _runs(text: Any) -> list[int]:
    """Return the run lengths of COCO's text.

    A character holds 5 bits of a number, and a sixth that says whether more follow. From the fourth number on, each
    is the difference from the one two places before.
    """
    if not isinstance(text, str):
        raise InputError("its run lengths are neither a list nor a text")
    runs: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 30:
            raise InputError("its run lengths are not in COCO's text")
        value |= (bits & 0x1F) << shift
        shift += 5
        if not bits & 0x20:
            if bits & 0x10:
                value -= 1 << shift
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    if shift:
        raise InputError("its run lengths are cut short")
    return runs
