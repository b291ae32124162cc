"""The measures that runs are scored by: counts of their captions, and of attention at nouns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from captioning.evaluation.records import CaptionedImage
from captioning.metrics.resampling import Floats, Statistic, percentage
from captioning.metrics.table import NOUN_METRICS, count
from captioning.progress import Progress

Captions = Mapping[int, CaptionedImage]


class Measure(NamedTuple):
    """S metrics that are functions of the same C counts."""

    keys: tuple[str, ...]  # names in files; ``TITLES`` has the names in tables
    counts: dict[str, Floats]  # by run, (images, C)
    values: Statistic  # from counts summed over images, (.., C), to percent, (.., S), or (..) of a single metric
    image_values: Callable[[Floats], Floats] | None = None  # from counts to the metrics of single images, (images, S)
    baseline: bool = False  # whether it is the score of attention that ignores the caption; it is not tested
    unit: str = ""  # of the second count, shown beside a score


def caption_measures(scored: Mapping[str, Sequence[CaptionedImage]], *, java: bool) -> list[Measure]:
    """Return the measures of captions, with METEOR if ``java`` and available; ``scored`` has the images by run."""
    measures: dict[tuple[str, ...], Measure] = {}
    for run, images in Progress("scoring captions", over=scored.items(), unit=" runs"):
        hypotheses, references = [image.words for image in images], [image.reference_words for image in images]
        for family, counted in count(hypotheses, references, java=java):
            measure = Measure(family.names, {}, family.values, family.image_values)
            measures.setdefault(family.names, measure).counts[run] = counted
    return list(measures.values())


def grounding_measures(scored: Mapping[str, Sequence[CaptionedImage]]) -> list[Measure]:
    """Return measures of attention at the nouns of captions and of references."""
    measures = []
    for name, metric in sorted(NOUN_METRICS.items(), key=lambda item: item[0].startswith("reference_")):
        counts = {}
        for run, images in scored.items():
            judged = [[float(getattr(hit, metric.field)) for hit in getattr(image, metric.hits)] for image in images]
            if any(judged):  # (images, 2): the sum over an image's nouns, and their number
                counts[run] = np.array([[sum(values), len(values)] for values in judged], dtype=np.float64)
        if counts:
            measures.append(Measure((name,), counts, percentage, baseline=metric.better is None, unit="nouns"))
    return measures
