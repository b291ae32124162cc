"""Outlines of objects in annotation files, checked before they are drawn, which takes memory as their numbers say."""

from __future__ import annotations

from typing import Any

from captioning.data.images import MAX_PIXELS
from captioning.errors import InputError

_BEYOND = 2  # image sizes that a polygon may lie outside; annotators overshoot by some pixels


def check_outline(outline: Any, height: Any, width: Any) -> None:
    """Refuse what is no outline in an image of that size: polygons, or run lengths, plain or in COCO's text.

    Args:
        outline: the ``segmentation`` of an object.
        height, width: of its image, in pixels.

    Raises:
        InputError: says what is wrong, without the file and object.
    """
    if not all(type(side) is int and side > 0 for side in (height, width)) or height * width > MAX_PIXELS:
        raise InputError(f"its image is {height} x {width} pixels, not a size of at most {MAX_PIXELS:,} pixels")
    if isinstance(outline, list):
        limit = _BEYOND * max(height, width)
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


def _runs(text: Any) -> list[int]:
    """Return the run lengths in COCO's text: 5 bits a character, the sixth says whether more follow; differences."""
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
