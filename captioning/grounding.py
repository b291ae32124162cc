"""Does attention look at what the words name? Alphas and object masks in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

# A noun phrase's adjectives stand between one of these and the noun.
_DETERMINERS = frozenset({"a", "an", "the", "one", "two", "three", "four", "another", "some"}) | frozenset(
    {"this", "that", "these", "those", "its", "his", "her", "their"}
)


@dataclass(frozen=True)
class GroundedObject:
    """One object of an image.

    Attributes:
        noun: what it is called, lower case; may be several words ("teddy bear").
        synonyms: other names that count as naming it (plurals, say).
        attributes: adjectives that are true of it, one word each.
        mask: (height, width) bool, its visible pixels: in the image as stored when it comes from an ``ObjectLookup``,
            in the model's view when it goes to ``noun_hits`` (``Preprocessing.mask`` takes one to the other).
    """

    noun: str
    synonyms: frozenset[str]
    attributes: frozenset[str]
    mask: NDArray[np.bool_]


class ObjectLookup(Protocol):
    """Where an image's objects are, asked by the data set's own image number."""

    def __call__(self, image_id: int) -> list[GroundedObject]:
        """Return the objects with masks in the pixels of the image as stored; [] if none are known."""


@dataclass(frozen=True)
class NounHit:
    """What attention did at a generated noun that names an object in view.

    Attributes:
        step: position in the caption of the noun, its last word where it has several.
        noun: as the caption has it.
        hit: whether the strongest location touches the object.
        chance: share of all locations that touch it: the probability that a random location is a hit.
    """

    step: int
    noun: str
    hit: bool
    chance: float


def noun_hits(
    words: Sequence[str], alphas: ArrayLike, grid_size: tuple[int, int], objects: Sequence[GroundedObject]
) -> list[NounHit]:
    """Judge every noun of a caption that names an object, in caption order.

    A location is a hit when its cell touches the object's mask, which is to say that the mask dilated by half a cell
    contains the cell's centre. Of several objects of one name, the ones that share most adjectives with the noun
    phrase are meant; touching any of them is a hit. A noun that names no object with a pixel in view is not counted.

    Args:
        words: the caption.
        alphas: (T, L) attention weights, row ``t`` belongs to ``words[t]``; further rows (<end>) are ignored. The
            first of equally strong locations counts.
        grid_size: (rows, columns) with rows x columns = L, row by row.
        objects: masks in the model's view, all of one size.

    Raises:
        ValueError: the shapes contradict each other.
    """
    rows, columns = grid_size
    alphas = np.asarray(alphas)
    if alphas.ndim != 2 or alphas.shape[1] != rows * columns:
        raise ValueError(f"alphas must be (T, {rows * columns}) for a grid of {rows} x {columns}, got {alphas.shape}")
    if len(alphas) < len(words):
        raise ValueError(f"alphas has {len(alphas)} rows for {len(words)} words")
    if len(sizes := {item.mask.shape for item in objects}) > 1:
        raise ValueError(f"masks must be of one size, the model's view, got {sorted(sizes)}")
    in_view = [item for item in objects if item.mask.any()]
    hits = []
    previous = 0  # the words up to here belong to another noun phrase
    for start, end, candidates in _mentions(words, in_view):
        adjectives = _adjectives(words, previous, start)
        previous = end
        shared = [len(adjectives & item.attributes) for item in candidates]
        meant = [item for item, count in zip(candidates, shared, strict=True) if count == max(shared)]
        touched = cells_touched(np.logical_or.reduce([item.mask for item in meant]), grid_size)
        strongest = int(alphas[end - 1].argmax())
        hits.append(
            NounHit(
                step=end - 1,
                noun=" ".join(words[start:end]),
                hit=bool(touched.flat[strongest]),
                chance=float(touched.mean()),
            )
        )
    return hits


def pointing_accuracy(hits: Sequence[NounHit]) -> float:
    """Return the percentage of hits; nan when no noun was counted."""
    return 100 * sum(item.hit for item in hits) / len(hits) if hits else float("nan")


def chance_pointing_accuracy(hits: Sequence[NounHit]) -> float:
    """Return the percentage that uniformly random locations would score at the same nouns, in expectation.

    The number to set beside ``pointing_accuracy``: large objects are easy to hit. nan when no noun was counted.
    """
    return 100 * sum(item.chance for item in hits) / len(hits) if hits else float("nan")


def cells_touched(mask: NDArray[np.bool_], grid_size: tuple[int, int]) -> NDArray[np.bool_]:
    """Return (rows, columns) bool: the cells that share area with a pixel of ``mask`` (height, width).

    The image is cut into rows x columns equal cells; where an edge runs through a pixel, both cells have a part of it.
    """
    (rows, columns), (height, width) = grid_size, mask.shape
    # Summed-area table: the pixels within a rectangle are four look-ups.
    area = np.zeros((height + 1, width + 1), dtype=np.int64)
    area[1:, 1:] = mask.cumsum(axis=0, dtype=np.int64).cumsum(axis=1)
    r, c = np.arange(rows), np.arange(columns)
    top, bottom = r * height // rows, -(-(r + 1) * height // rows)
    left, right = c * width // columns, -(-(c + 1) * width // columns)
    inside = area[bottom][:, right] - area[top][:, right] - area[bottom][:, left] + area[top][:, left]
    return inside > 0


def _mentions(words: Sequence[str], objects: Sequence[GroundedObject]) -> list[tuple[int, int, list[GroundedObject]]]:
    """Return (start, end, objects of that name) for every name in the caption; the longest name wins."""
    named: dict[tuple[str, ...], list[GroundedObject]] = {}
    for item in objects:
        for name in {item.noun, *item.synonyms}:
            named.setdefault(tuple(name.split()), []).append(item)
    lengths = sorted({len(name) for name in named}, reverse=True)
    mentions = []
    start = 0
    while start < len(words):
        for length in lengths:
            found = named.get(tuple(words[start : start + length]))
            if found and start + length <= len(words):  # a slice may be cut short and match a shorter name
                mentions.append((start, start + length, found))
                start += length
                break
        else:
            start += 1
    return mentions


def _adjectives(words: Sequence[str], first: int, noun: int) -> frozenset[str]:
    """Return the words before position ``noun``, back to the phrase's determiner or to ``first``."""
    start = noun
    while start > first and words[start - 1] not in _DETERMINERS:
        start -= 1
    return frozenset(words[start:noun])
