"""The table of captions: every metric with its interval and test; and the images where runs disagree most."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from captioning.comparison.measures import Measure, Scored, add_score_table
from captioning.comparison.result import Cell, Comparison, Disagreement, Row
from captioning.evaluation.metrics import Family, count
from captioning.evaluation.records import CaptionedImage
from captioning.evaluation.resampling import Floats

Counted = list[tuple[Family, Floats]]
"""Counts (images, C) of every family of metrics."""


def counts_of(captions: dict[int, CaptionedImage], ids: Sequence[int], java: bool) -> Counted:
    hypotheses, references = [captions[i].words for i in ids], [captions[i].reference_words for i in ids]
    return count(hypotheses, references, java=java)


def caption_measures(counted: dict[str, Counted]) -> list[Measure]:
    """Return the measures of counts by run."""
    families = {family.names: family for families in counted.values() for family, _ in families}
    return [
        Measure(
            names,
            family.titles,
            {run: counts for run, of_run in counted.items() for other, counts in of_run if other.names == names},
            family.values,
        )
        for names, family in families.items()
    ]


def compare_captions(
    result: Comparison, scored: Scored, counted: dict[str, Counted], measures: Sequence[Measure]
) -> None:
    """Add the table of captions."""
    images = f"{result.images} images" if scored.common else "each run's own images"
    change = (
        " and the difference from the first run with its 95 % interval (paired bootstrap) "
        "and p-value (randomization test)"
    )
    note = (
        "Percent; BLEU with brevity penalty, CIDEr-D times 100. Below each score its 95 % interval (bootstrap over "
        f"images){change * bool(scored.compared)}, {scored.resamples} resamples."
    )
    table = add_score_table(result, scored, measures, f"Captions of {images}", note)
    lengths = [_length_ratio(counted[run][0][1]) if run in counted else None for run in result.runs]
    table.rows.append(Row("Words per reference word", [Cell.plain(value, "{:.3f}") for value in lengths]))


def _length_ratio(counts: Floats) -> float:
    hypothesis, reference = counts[:, -2:].sum(axis=0)
    return float(hypothesis / reference) if reference else math.nan


def disagreements(
    tested: dict[str, dict[int, CaptionedImage]],
    counted: dict[str, Counted],
    common: list[int],
    metric: str,
    images: int,
) -> list[Disagreement]:
    """Return the images whose captions differ, those whose own scores differ most first."""
    scores = np.stack(
        [
            family.of_images(counts)[:, family.names.index(metric)]
            for families in counted.values()
            for family, counts in families
            if metric in family.names
        ]
    )
    spread = scores.max(axis=0) - scores.min(axis=0)
    differ = [i for i, image in enumerate(common) if len({run[image].caption for run in tested.values()}) > 1]
    return [
        Disagreement(
            image_id=common[i],
            captions={name: captions[common[i]].caption for name, captions in tested.items()},
            scores={name: float(score) for name, score in zip(tested, scores[:, i], strict=True)},
            references=next(iter(tested.values()))[common[i]].references,
        )
        for i in sorted(differ, key=lambda i: -round(float(spread[i]), 9))[:images]
    ]
