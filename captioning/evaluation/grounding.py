"""Pointing accuracy and attention correctness: does attention look at the objects that the words name?"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from captioning.cells import CellGrid
from captioning.data.records import CaptionIndex, GroundedObject, ObjectLookup
from captioning.encoders import Encoder
from captioning.evaluation.metrics import NOUN_METRICS
from captioning.evaluation.records import NounHit
from captioning.evaluation.resampling import Floats, ratio

# The adjectives of a noun phrase stand between one of these and the noun.
_DETERMINERS = frozenset("a an the one two three four another some this that these those its his her their".split())


@dataclass(frozen=True)
class ObjectCells:
    """Objects that share noun and attributes, which captions cannot tell apart: some hundred bytes, not masks."""

    names: frozenset[str]  # the noun and its synonyms
    attributes: frozenset[str]
    covered: Floats  # (height, width) of the grid: the fraction of each cell's area that lies on one of the objects
    cells: CellGrid


def object_cells(objects: Sequence[GroundedObject], cells: CellGrid) -> list[ObjectCells]:
    """Lay the encoder's cells over an image's objects, once for all captions of the image."""
    alike: dict[tuple[str, frozenset[str]], list[GroundedObject]] = {}
    for item in objects:
        alike.setdefault((item.noun, item.attributes), []).append(item)
    laid_out = []
    for (noun, attributes), items in alike.items():
        covered = cell_coverage(np.logical_or.reduce([item.mask for item in items]), cells)
        names = frozenset({noun}).union(*(item.synonyms for item in items))
        laid_out.append(ObjectCells(names, attributes, covered, cells))
    return laid_out


@dataclass
class ObjectsInView:
    """Objects of a split's images on the encoder's cells, laid out once, and again where training moves the cells."""

    lookup: ObjectLookup | None  # by image id, in the pixels of the upright image; None if the data set has no masks
    index: CaptionIndex
    encoder: Encoder
    _cells: CellGrid | None = None
    _objects: dict[int, list[ObjectCells]] = field(default_factory=dict)

    def __call__(self, row: int) -> list[ObjectCells]:
        """Return the objects of the image in a row of the split."""
        if self.lookup is None:
            return []
        if self._cells != (cells := self.encoder.cells):
            self._objects, self._cells = {}, cells
        if row not in self._objects:
            objects, view = self.lookup(int(self.index.image_ids[row])), self.encoder.preprocessing
            in_view = [dataclasses.replace(item, mask=view.mask(item.mask)) for item in objects]
            self._objects[row] = object_cells(in_view, cells)
        return self._objects[row]


def noun_hits(words: Sequence[str], alphas: ArrayLike, objects: Sequence[ObjectCells]) -> list[NounHit]:
    """Judge every noun of a caption that names an object, in caption order.

    A location is a hit if its cell touches the object, that is, if the mask dilated by half a cell contains the cell's
    centre. If several objects have the name, those that share most adjectives with the noun phrase count, together. A
    noun that names no object with a pixel in view is not counted.

    Correctness is the attention correctness of Liu et al. ("Attention correctness in neural image captioning", AAAI
    2017), the attention's sum over the region that the word names. Differs from the paper: a location's weight is
    spread evenly over its cell, so a cell on the region's edge counts by the fraction of it that is covered, where they
    enlarge the map to the image's size by interpolation and sum over pixels. A phrase is judged at its noun, where they
    take the largest sum among its words. The region is its part in the model's view, after the crop.

    Args:
        words: The caption, generated or a reference.
        alphas: (T, L) attention weights; step t belongs to ``words[t]``, further steps (<end>) are ignored. The first
            of equally strong locations counts.
        objects: The objects from ``object_cells``, on the grid of L locations.
    """
    if not objects:
        return []
    cells = objects[0].cells
    alphas = np.asarray(alphas).reshape(-1, *cells.grid_size)
    centre = centre_attention(cells)
    hits = []
    for start, end, adjectives, named in _mentions(words, objects):
        shared = [(len(adjectives & item.attributes), item.covered) for item in named if item.covered.any()]
        if not shared:
            continue
        most = max(number for number, _ in shared)
        # A visible pixel belongs to one object, so fractions add up.
        covered = np.minimum(sum(fractions for number, fractions in shared if number == most), 1.0)
        touched, alpha = covered > 0, alphas[end - 1]
        location = int(alpha.argmax())
        hits.append(
            NounHit(
                step=end - 1,
                noun=" ".join(words[start:end]),
                hit=bool(touched.flat[location]),
                chance=float(touched.mean()),
                centre_hit=float(touched[_central_cells(cells)].mean()),
                correctness=float((alpha * covered).sum()),
                uniform=float(covered.mean()),
                centre=float((centre * covered).sum()),
                location=location,
            )
        )
    return hits


def grounding_metrics(hits: Sequence[NounHit]) -> dict[str, float]:
    """Return the means over nouns in percent, each beside baselines that ignore the caption; {} if there is no noun.

    ``pointing_accuracy`` has ``pointing_chance`` (uniformly random locations) and ``pointing_centre`` (always the
    middle); ``attention_correctness`` has ``correctness_uniform`` and ``correctness_centre``. Large objects are easy to
    hit, and photographers put them in the middle.
    """
    if not hits:
        return {}
    sums = {name: sum(getattr(hit, metric.field) for hit in hits) for name, metric in NOUN_METRICS.items()}
    return {name: 100 * total / len(hits) for name, total in sums.items()}


@functools.cache
def centre_attention(cells: CellGrid) -> Floats:
    """Return attention (height, width) on the middle of the view, whatever the words; it sums to 1.

    A Gaussian at the centre of the view with standard deviations of a quarter of its height and of its width, read at
    the cells' centres: half of its mass lies in the middle quarter of the view's area.
    """
    places = (centres / side for centres, side in zip(cells.centres(), cells.size, strict=True))
    weights = np.outer(*(np.exp(-0.5 * ((place - 0.5) / 0.25) ** 2) for place in places))
    return weights / weights.sum()


def cell_coverage(mask: NDArray[np.bool_], cells: CellGrid) -> Floats:
    """Return the exact fraction of each cell's area in view that a mask of the view covers, for the cells of the grid.

    A pixel on an edge between cells is divided between them. The fraction of a cell out of view is 0.
    """
    (vertical, heights), (horizontal, widths) = _overlaps(cells)
    return ratio(vertical @ mask.astype(np.float64) @ horizontal.T, np.outer(heights, widths))


@functools.cache
def _overlaps(cells: CellGrid) -> list[tuple[Floats, Floats]]:
    """Return for each axis the overlap of cells and pixels, (cells, pixels), and the length of the cells, (cells,)."""
    overlaps = []
    for edges, pixels, count in zip(cells.edges(), cells.size, cells.grid_size, strict=True):
        # In units of 1 / count of a pixel, the edges of a regular grid are whole numbers, which floats hold exactly.
        edges = np.round(edges * count, 6)
        pixel = np.arange(pixels) * count
        shared = np.minimum(edges[1:, None], pixel + count) - np.maximum(edges[:-1, None], pixel)
        overlaps.append((shared.clip(min=0), np.diff(edges)))
    return overlaps


@functools.cache
def _central_cells(cells: CellGrid) -> tuple[NDArray[np.intp], ...]:
    """Return an index of the cells nearest to the view's middle; several may be equally near."""
    distances = [np.abs(centres - side / 2) for centres, side in zip(cells.centres(), cells.size, strict=True)]
    return np.ix_(*(away <= away.min() + 1e-6 * stride for away, stride in zip(distances, cells.stride, strict=True)))


def _mentions(
    words: Sequence[str], objects: Sequence[ObjectCells]
) -> Iterator[tuple[int, int, frozenset[str], list[ObjectCells]]]:
    """Yield start, end, adjectives and the objects of that name for every name in the caption; the longest one wins.

    The adjectives are the words before it, back to the phrase's determiner or to the name before.
    """
    longest = max(len(name.split()) for item in objects for name in item.names)
    start = phrase = 0  # where the noun phrase begins, after its determiner
    while start < len(words):
        for end in range(min(start + longest, len(words)), start, -1):
            name = " ".join(words[start:end])
            if named := [item for item in objects if name in item.names]:
                yield start, end, frozenset(words[phrase:start]), named
                start = phrase = end
                break
        else:
            phrase = start + 1 if words[start] in _DETERMINERS else phrase
            start += 1
