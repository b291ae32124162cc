"""What runs are scored on and by: counts of their captions, and of attention at nouns, on the images they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from captioning.comparison.result import Comparison
from captioning.evaluation.metrics import METRICS, NOUN_METRICS, Family, count
from captioning.evaluation.records import CaptionedImage
from captioning.evaluation.resampling import Floats, Statistic, percentage

Captions = Mapping[int, CaptionedImage]


class Measure(NamedTuple):
    """Metrics that are functions of the same counts.

    Attributes:
        keys: Names of the S metrics in files.
        titles: Names of the S metrics in tables.
        counts: By run, (images, C).
        values: From counts summed over images, (.., C), to percent, (.., S) or (..) of a single metric.
        of_images: From counts (images, C) to the metrics of single images, (images, S); None if they have none.
        baseline: Whether it is what a run would score without looking at its captions; baselines are not tested.
        unit: What the second column of the counts counts, shown beside a score.
    """

    keys: tuple[str, ...]
    titles: tuple[str, ...]
    counts: dict[str, Floats]
    values: Statistic
    of_images: Callable[[Floats], Floats] | None = None
    baseline: bool = False
    unit: str = ""


def titles_of(measures: Sequence[Measure]) -> dict[str, str]:
    """Return the names of all metrics in tables by their names in files."""
    return {key: title for measure in measures for key, title in zip(measure.keys, measure.titles, strict=True)}


def common_images(tested: Mapping[str, Captions], result: Comparison) -> list[int]:
    """Return the ids of the images that all tested runs captioned, with a notice where they are not all images."""
    if not tested:
        return []
    first, *others = tested.values()
    shared = sorted(set(first).intersection(*others))
    # An id alone does not make an image: another data set has other references under the same number.
    common = [i for i in shared if all(set(first[i].references) & set(run[i].references) for run in others)]
    if any(len(run) != len(common) for run in tested.values()):
        sizes = ", ".join(f"{name} {len(run)}" for name, run in tested.items())
        result.notices.append(
            f"The runs were evaluated on different images ({sizes}); compared on the {len(common)} in common."
            if common
            else f"The runs have no image in common ({sizes}): each is scored on its own images, and no test is made."
        )
    result.images = len(common)
    return common


def caption_measures(scored: Mapping[str, Sequence[CaptionedImage]], *, java: bool) -> list[Measure]:
    """Return the measures of captions, with METEOR if ``java`` and available; ``scored`` has the images by run."""
    families: dict[tuple[str, ...], Family] = {}
    counts: dict[tuple[str, ...], dict[str, Floats]] = {}
    for run, images in scored.items():
        hypotheses, references = [image.words for image in images], [image.reference_words for image in images]
        for family, counted in count(hypotheses, references, java=java):
            families[family.names] = family
            counts.setdefault(family.names, {})[run] = counted
    return [
        Measure(names, tuple(family.titles), counts[names], family.values, family.of_images)
        for names, family in families.items()
    ]


def grounding_measures(scored: Mapping[str, Sequence[CaptionedImage]]) -> list[Measure]:
    """Return measures of attention at the nouns of captions and of references."""
    measures = []
    for prefix, judgements in {"": "hits", "reference_": "reference_hits"}.items():
        for name in NOUN_METRICS:
            metric, counts = METRICS[prefix + name], {}
            for run, images in scored.items():
                judged = [[getattr(noun, metric.field) for noun in getattr(image, judgements)] for image in images]
                if any(judged):  # (images, 2): the sum over an image's nouns, and their number
                    counts[run] = np.array([[sum(map(float, of)), len(of)] for of in judged], dtype=np.float64)
            if counts:
                key, baseline = prefix + name, metric.better is None
                measures.append(Measure((key,), (metric.title,), counts, percentage, baseline=baseline, unit="nouns"))
    return measures
