"""Does attention look at what the words name? Alphas and object masks in, numbers out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from captioning.cells import CellGrid
from captioning.data.objects import GroundedObject
from captioning.evaluation.records import NounHit

# A noun phrase's adjectives stand between one of these and the noun.
_DETERMINERS = frozenset({"a", "an", "the", "one", "two", "three", "four", "another", "some"}) | frozenset(
    {"this", "that", "these", "those", "its", "his", "her", "their"}
)


@dataclass(frozen=True)
class ObjectCells:
    """What ``noun_hits`` needs of the objects that share name and attributes, a few hundred bytes in place of masks.

    Attributes:
        noun, synonyms, attributes, decoys: as of each ``GroundedObject``.
        covered: (rows, columns), the share in [0, 1] of every cell's area that lies on one of them; all 0 where none is
            in view.
        cells: the grid.
    """

    noun: str
    synonyms: frozenset[str]
    attributes: frozenset[str]
    decoys: frozenset[str]
    covered: NDArray[np.float64]
    cells: CellGrid

    def named(self, phrase: str) -> bool:
        return phrase == self.noun or phrase in self.synonyms


def object_cells(objects: Sequence[GroundedObject], cells: CellGrid) -> list[ObjectCells]:
    """Lay the encoder's cells over an image's objects, once for all that is ever said about the image.

    Objects that share noun and attributes cannot be told apart by a caption and become one, exactly, pixel by pixel.

    Raises:
        ValueError: masks that are not of the view's size.
    """
    if (sizes := {item.mask.shape for item in objects}) - {cells.size}:
        raise ValueError(f"masks must be of one size, the model's view {cells.size}, got {sorted(sizes)}")
    alike: dict[tuple[str, frozenset[str]], list[GroundedObject]] = {}
    for item in objects:
        alike.setdefault((item.noun, item.attributes), []).append(item)
    return [
        ObjectCells(
            noun=noun,
            synonyms=_union([item.synonyms for item in items]),
            attributes=attributes,
            decoys=_union([item.decoys for item in items]),
            covered=cell_coverage(np.logical_or.reduce([item.mask for item in items]), cells),
            cells=cells,
        )
        for (noun, attributes), items in alike.items()
    ]


def noun_hits(words: Sequence[str], alphas: ArrayLike, objects: Sequence[ObjectCells]) -> list[NounHit]:
    """Judge every noun of a caption that names an object, in caption order.

    A location is a hit when its cell touches the object, which is to say that the mask dilated by half a cell
    contains the cell's centre. Of several objects of one name, the ones that share most adjectives with the noun
    phrase are meant, all of them together. A noun that names no object with a pixel in view is not counted.

    Correctness is the attention correctness of Liu et al. ("Attention correctness in neural image captioning", AAAI
    2017), the attention's sum over the region that the word names. Differs from the paper: a location's weight is
    spread evenly over its cell, so a cell on the region's edge counts by the share of it that is covered, where they
    enlarge the map to the image's size by interpolation and sum over pixels; a phrase is judged at its noun, where
    they take the largest sum among its words; and the region is what the model saw of it, after the crop.

    Args:
        words: the caption, generated or a reference.
        alphas: (T, L) attention weights, row ``t`` belongs to ``words[t]``; further rows (<end>) are ignored. The
            first of equally strong locations counts.
        objects: of ``object_cells``, for the grid of L locations.

    Raises:
        ValueError: the shapes contradict each other.
    """
    if not objects:
        return []
    cells = objects[0].cells
    rows, columns = cells.grid_size
    alphas = np.asarray(alphas)
    if alphas.ndim != 2 or alphas.shape[1] != rows * columns:
        raise ValueError(f"alphas must be (T, {rows * columns}) for a grid of {rows} x {columns}, got {alphas.shape}")
    if len(alphas) < len(words):
        raise ValueError(f"alphas has {len(alphas)} rows for {len(words)} words")
    centre, central = centre_attention(cells), _central_cells(cells)
    hits = []
    previous = 0  # the words up to here belong to another noun phrase
    for start, end, candidates in _mentions(words, objects):
        adjectives = _adjectives(words, previous, start)
        previous = end
        in_view = [item for item in candidates if item.covered.any()]
        if not in_view:
            continue
        shared = [len(adjectives & item.attributes) for item in in_view]
        meant = [item.covered for item, count in zip(in_view, shared, strict=True) if count == max(shared)]
        covered = np.minimum(sum(meant), 1.0)  # visible pixels belong to one object alone, so shares add up
        touched = covered > 0
        alpha = alphas[end - 1].reshape(rows, columns)
        hits.append(
            NounHit(
                step=end - 1,
                noun=" ".join(words[start:end]),
                hit=bool(touched.flat[int(alpha.argmax())]),
                chance=float(touched.mean()),
                centre_hit=float(touched[central].mean()),
                correctness=float((alpha * covered).sum()),
                uniform=float(covered.mean()),
                centre=float((centre * covered).sum()),
            )
        )
    return hits


def grounding_scores(hits: Sequence[NounHit]) -> dict[str, float]:
    """Return the means over nouns, in percent, each measure beside what knows nothing of the caption.

    Returns:
        ``pointing_accuracy`` with ``pointing_chance`` (uniformly random locations) and ``pointing_centre`` (always the
        middle); ``attention_correctness`` with ``correctness_uniform`` and ``correctness_centre``. Large objects are
        easy to hit, and photographers put them in the middle. Empty when no noun was counted.
    """
    columns = {
        "pointing_accuracy": "hit",
        "pointing_chance": "chance",
        "pointing_centre": "centre_hit",
        "attention_correctness": "correctness",
        "correctness_uniform": "uniform",
        "correctness_centre": "centre",
    }
    if not hits:
        return {}
    return {name: 100 * sum(getattr(hit, column) for hit in hits) / len(hits) for name, column in columns.items()}


def posterior_scores(name: str, hits: Sequence[NounHit]) -> dict[str, float]:
    """Return the means over nouns judged by the posterior, in percent; what they are beside is the prior's."""
    measures = ("pointing_accuracy", "attention_correctness")
    return {f"{name}_{key}": value for key, value in grounding_scores(hits).items() if key in measures}


@functools.cache
def centre_attention(cells: CellGrid) -> NDArray[np.float64]:
    """Return (rows, columns) attention that looks at the middle whatever is said; sums to 1.

    A Gaussian at the centre of the view with standard deviations of a quarter of its height and of its width, read at
    the cells' centres: half of its mass lies in the middle quarter of the view's area.
    """
    rows, columns = (
        np.exp(-0.5 * ((centres / side - 0.5) / 0.25) ** 2)
        for centres, side in zip(cells.centres(), cells.size, strict=True)
    )
    weights = np.outer(rows, columns)
    weights /= weights.sum()
    weights.setflags(write=False)  # shared by every caller
    return weights


def cell_coverage(mask: NDArray[np.bool_], cells: CellGrid) -> NDArray[np.float64]:
    """Return (rows, columns), the share of each cell's area in view that ``mask`` (height, width) covers, exactly.

    Where an edge runs through a pixel, each cell has its part of it. A cell out of view has nothing to be covered: 0.
    """
    (rows, heights), (columns, widths) = _overlaps(cells)
    area = np.outer(heights, widths)
    return np.divide(rows @ mask.astype(np.float64) @ columns.T, area, out=np.zeros_like(area), where=area > 0)


@functools.cache
def _overlaps(cells: CellGrid) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return per axis (cells, pixels), how long a piece cell and pixel share, and (cells,), how long the cells are."""
    found = []
    for edges, pixels, count in zip(cells.edges(), cells.size, cells.grid_size, strict=True):
        # In 1 / count of a pixel the edges of a regular grid are whole numbers, which floats hold exactly.
        edges = np.round(edges * count, 6)
        pixel = np.arange(pixels) * count
        shared = np.minimum(edges[1:, None], pixel + count) - np.maximum(edges[:-1, None], pixel)
        found.append((shared.clip(min=0), np.diff(edges)))
    return found


@functools.lru_cache(maxsize=1024)
def _longest(phrases: frozenset[str]) -> int:
    """Return the words of the longest phrase; asked for the same few sets at every caption."""
    return max((len(phrase.split()) for phrase in phrases), default=0)


def _union(sets: Sequence[frozenset[str]]) -> frozenset[str]:
    """Return the union; the first set itself where it is all, since a table's sets are large and shared."""
    return sets[0] if all(other <= sets[0] for other in sets[1:]) else sets[0].union(*sets)


def _central_cells(cells: CellGrid) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return an index of the cells nearest to the view's middle: one, or several that are as near."""
    nearest = []
    for centres, side, stride in zip(cells.centres(), cells.size, cells.stride, strict=True):
        distance = np.abs(centres - side / 2)
        nearest.append(np.flatnonzero(distance <= distance.min() + 1e-6 * stride))
    return np.ix_(*nearest)  # type: ignore[return-value]


def _mentions(words: Sequence[str], objects: Sequence[ObjectCells]) -> list[tuple[int, int, list[ObjectCells]]]:
    """Return (start, end, objects of that name) for every name in the caption; the longest phrase wins.

    Decoys are found like names, so that they hide what they hold, and are left out.
    """
    longest = max(
        _longest(phrases) for item in objects for phrases in (item.synonyms, item.decoys, frozenset({item.noun}))
    )
    mentions = []
    start = 0
    while start < len(words):
        for end in range(min(start + longest, len(words)), start, -1):
            phrase = " ".join(words[start:end])
            found = [item for item in objects if item.named(phrase)]
            if found:
                mentions.append((start, end, found))
            if found or any(phrase in item.decoys for item in objects):
                start = end
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
