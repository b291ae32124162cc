"""The table of captions: every score with its interval and test; and the images where runs disagree most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from captioning.comparison.formats import p_text, plain_cell, range_text
from captioning.comparison.measures import Measure, Scored, add_score_table
from captioning.comparison.result import Comparison, Disagreement, Row
from captioning.evaluation.records import CaptionedImage
from captioning.evaluation.resampling import Difference, Floats
from captioning.evaluation.scores import TITLES, Family, count

ONE_SEED = "one seed each: says nothing of the method"
"""What every verdict over runs of one seed each says, since other seeds could order the methods differently."""


Counted = list[tuple[Family, Floats]]
"""Counts (images, C) of every family of scores."""


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
            family.scores,
        )
        for names, family in families.items()
    ]


def compare_captions(
    result: Comparison, scored: Scored, counted: dict[str, Counted], measures: Sequence[Measure]
) -> None:
    """Add the table of captions, and the verdicts on the runs that are tested one by one."""
    images = f"{result.images} images" if scored.common else "each run's own images"
    note = (
        "Percent; BLEU with brevity penalty, CIDEr-D times 100. Below each score its 95 % interval (bootstrap over "
        "images) and the difference from the first run with its 95 % interval (paired bootstrap) and p-value "
        f"(randomization test), {scored.resamples} resamples. They reflect the choice of images, not that of the "
        "training seed."
    )
    table = add_score_table(result, scored, measures, f"Captions of {images}", note)
    result.verdicts = {name: _verdict(result, result.runs[0], name) for name in result.tests}
    lengths = [_length_ratio(counted[run][0][1]) if run in counted else None for run in result.runs]
    table.rows.append(Row("Length, words per reference word", [plain_cell(value, "{:.3f}") for value in lengths]))


def _verdict(result: Comparison, first: str, run: str) -> str:
    metric = result.metric
    before, after = (result.scores[name][metric].value for name in (first, run))
    test, title = result.tests[run][metric], TITLES[metric]
    change = test.interval
    if change.value == 0 and test.p_value == 1:
        return f"{run} and {first} have the same {title}, {after:.2f}, on {result.images} images; {ONE_SEED}."
    than = "higher" if change.value > 0 else "lower"
    return (
        f"{run} scores {title} {after:.2f}, {abs(change.value):.2f} {than} than {first} ({before:.2f}) on "
        f"{result.images} images: {finding(test)}; {ONE_SEED}."
    )


def finding(test: Difference) -> str:
    """Return whether there is a difference, with its interval and p-value. It is clear only where both agree."""
    if test.clear:
        verdict = "a clear difference"
    elif test.excludes_zero:
        verdict = "the evidence is weak, since the interval excludes zero but the test is not significant"
    elif test.significant:
        verdict = "the evidence is weak, since the test is significant but the interval includes zero"
    else:
        verdict = "no clear difference"
    return f"{verdict} (95 % interval {range_text(test.interval, signed=True)}, corrected {p_text(test.corrected)})"


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
    """Return the images whose captions' own scores differ most; of equal differences, those with fewer common words."""
    scores = np.stack(
        [
            family.of_images(counts)[:, family.names.index(metric)]
            for families in counted.values()
            for family, counts in families
            if metric in family.names
        ]
    )
    spread = scores.max(axis=0) - scores.min(axis=0)
    distance = [_distance([captions[i].caption for captions in tested.values()]) for i in common]
    order = sorted(range(len(common)), key=lambda i: (-round(float(spread[i]), 9), -distance[i], common[i]))
    return [
        Disagreement(
            image_id=common[i],
            captions={name: captions[common[i]].caption for name, captions in tested.items()},
            scores={name: float(score) for name, score in zip(tested, scores[:, i], strict=True)},
            references=next(iter(tested.values()))[common[i]].references,
        )
        for i in order[:images]
        if distance[i]  # else all captions are equal
    ]


def _distance(captions: Iterable[str]) -> float:
    """Return 0 for equal captions, up to 1 for captions without a common word. Order counts a little."""
    captions = list(captions)
    words = [set(caption.split()) for caption in captions]
    union = set[str]().union(*words)
    if not union:
        return 0.0
    apart = 1 - len(set.intersection(*words)) / len(union)
    return apart or (0.0 if len(set(captions)) == 1 else 1e-3)
