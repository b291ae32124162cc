"""The measures that runs are scored by: counts of their captions, and of attention at nouns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from captioning.evaluation.records import CaptionedImage
from captioning.metrics.resampling import Floats, Statistic, percentage
from captioning.metrics.table import EVIDENCE_METRICS, METRICS, NOUN_METRICS, count
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
    by_evidence = {EVIDENCE_METRICS[name]: ("evidence_hits", NOUN_METRICS[name].field) for name in EVIDENCE_METRICS}
    judgements = {name: ("hits", metric.field) for name, metric in NOUN_METRICS.items()} | by_evidence
    for prefix in ("", "reference_"):
        for name, (hits, judged_by) in judgements.items():
            metric, counts = METRICS[prefix + name], {}
            for run, images in scored.items():
                judged = [[getattr(hit, judged_by) for hit in getattr(image, prefix + hits)] for image in images]
                if any(judged):  # (images, 2): the sum over an image's nouns, and their number
                    counts[run] = np.array([[sum(map(float, of)), len(of)] for of in judged], dtype=np.float64)
            measure = Measure((prefix + name,), counts, percentage, baseline=metric.better is None, unit="nouns")
            measures += [measure] * bool(counts)
    return measures
