"""Regions of an image that a caption's words name: objects and phrases, laid out on an encoder's cells."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioning.cells import CellGrid
from captioning.data.coco_nouns import long_names
from captioning.data.records import CaptionIndex, CaptionSource, GroundedObject
from captioning.data.transforms import ViewFunction

if TYPE_CHECKING:
    from captioning.encoders import Encoder

Floats = NDArray[np.float64]

LARGEST_REGION = 0.5
"""A region that covers a larger fraction of the view is the scene, and does not tell where a phrase is."""

# The adjectives of a noun phrase stand between one of these and the noun.
_DETERMINERS = frozenset("a an the one two three four another some this that these those its his her their".split())


class Region(NamedTuple):
    """The region of a phrase, words start .. end - 1 of a caption. Words noun_start .. end - 1 are its noun."""

    start: int
    noun_start: int
    end: int
    coverage: Floats  # (height, width) of the grid: the fraction of each cell's area that lies in the region


class ObjectRegion(NamedTuple):
    """Objects that share noun and attributes, so that no caption tells them apart."""

    names: frozenset[str]  # the noun and its synonyms
    attributes: frozenset[str]
    coverage: Floats  # as in ``Region``


def object_regions(objects: Sequence[GroundedObject], cells: CellGrid) -> list[ObjectRegion]:
    """Return the regions of an image's objects on the encoder's cells."""
    groups: dict[tuple[str, frozenset[str]], list[GroundedObject]] = {}
    for item in objects:
        groups.setdefault((item.noun, item.attributes), []).append(item)
    regions = []
    for (noun, attributes), items in groups.items():
        coverage = cells.coverage(np.logical_or.reduce([item.mask for item in items]))
        regions.append(ObjectRegion(frozenset({noun}).union(*(item.synonyms for item in items)), attributes, coverage))
    return regions


def named_regions(words: Sequence[str], objects: Sequence[ObjectRegion]) -> list[Region]:
    """Return the regions of the objects that a caption names, in caption order.

    If several objects have the name, the region is that of the objects with the most attributes in the noun phrase. A
    noun has no region if its objects are out of view.
    """
    regions: list[Region] = []
    category_names, longest = long_names()
    longest = max([longest, *(len(name.split()) for item in objects for name in item.names)])
    noun_start = phrase_start = 0  # a phrase begins with its determiner, or after the last name
    while objects and noun_start < len(words):
        for end in range(min(noun_start + longest, len(words)), noun_start, -1):  # the longest name wins
            name, adjectives = " ".join(words[noun_start:end]), frozenset(words[phrase_start:noun_start])
            matches = [item for item in objects if name in item.names]
            if not matches and name not in category_names:  # "a hot dog" does not name a dog
                continue
            if pairs := [(len(adjectives & item.attributes), item.coverage) for item in matches if item.coverage.any()]:
                most_shared = max(count for count, _ in pairs)
                # A visible pixel belongs to one object, so fractions add up.
                coverage = np.minimum(sum(fractions for count, fractions in pairs if count == most_shared), 1.0)
                is_short = words[phrase_start] in _DETERMINERS and noun_start - phrase_start <= 2  # "a red train"
                regions.append(Region(phrase_start if is_short else noun_start, noun_start, end, coverage))
            noun_start = phrase_start = end
            break
        else:
            phrase_start = noun_start if words[noun_start] in _DETERMINERS else phrase_start
            noun_start += 1
    return regions


@dataclass
class RegionsInView:
    """Regions of objects and of captions of a split's images on the encoder's cells. They are kept in memory.

    If ``cells`` are given, they are used instead of the encoder's cells, which training may move.
    """

    source: CaptionSource
    split: str
    index: CaptionIndex
    encoder: Encoder
    cells: CellGrid | None = None

    def __post_init__(self) -> None:
        self._object_lookup = self.source.objects(self.split)
        self._phrase_lookup = self.source.phrases(self.split)
        cache = functools.lru_cache(2 * len(self.index))  # plain and mirrored; entries of earlier cells fall out
        self._object_regions = cache(self._compute_object_regions)
        self._caption_regions = cache(self._compute_caption_regions)

    def __reduce__(self) -> tuple[Any, ...]:  # a process that loads images may be sent a copy
        return type(self), (self.source, self.split, self.index, self.encoder, self.cells)

    @property
    def available(self) -> bool:
        """Whether the data set has regions at all."""
        return self._object_lookup is not None or self._phrase_lookup is not None

    def object_regions(self, row: int) -> list[ObjectRegion]:
        """Return an image's objects in the view of evaluation."""
        return self._object_regions(row, self.encoder.preprocessing.evaluation_view, self.cells or self.encoder.cells)

    def caption_regions(
        self, row: int, view_function: ViewFunction | None = None, *, cached: bool = True
    ) -> list[list[Region]]:
        """Return, for each caption of an image, the regions of its phrases, or of the objects that it names.

        Regions out of view are left out, and so are regions of phrases above ``LARGEST_REGION``; objects may be larger.
        By default the view is the evaluation view. Set ``cached`` to False for a view that does not recur.
        """
        view_function = view_function or self.encoder.preprocessing.evaluation_view
        compute = self._caption_regions if cached else self._compute_caption_regions
        return compute(row, view_function, self.cells or self.encoder.cells)

    def _compute_caption_regions(self, row: int, view_function: ViewFunction, cells: CellGrid) -> list[list[Region]]:
        path, references = self.index.image_path(row), self.index.references(row)
        captions = [] if self._phrase_lookup is None else self._phrase_lookup(path, references)
        masks = {id(phrase.mask): phrase.mask for phrases in captions for phrase in phrases}  # captions share masks
        by_mask = {key: cells.coverage(view_function(mask.shape[::-1]).mask(mask)) for key, mask in masks.items()}
        if masks:
            regions = [[Region(start, start, end, by_mask[id(m)]) for start, end, m in phrases] for phrases in captions]
            return [[item for item in caption if 0 < item.coverage.mean() <= LARGEST_REGION] for caption in regions]
        is_cached = view_function == self.encoder.preprocessing.evaluation_view
        compute = self._object_regions if is_cached else self._compute_object_regions
        objects = compute(row, view_function, cells)
        return [named_regions(caption.split(), objects) for caption in references]

    def _compute_object_regions(self, row: int, view_function: ViewFunction, cells: CellGrid) -> list[ObjectRegion]:
        objects = [] if self._object_lookup is None else self._object_lookup(self.index.image_path(row))
        in_view = [item._replace(mask=view_function(item.mask.shape[::-1]).mask(item.mask)) for item in objects]
        return object_regions(in_view, cells)
