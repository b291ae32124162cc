"""Scores of runs over images and of variants over seeds, with intervals and tests against the first one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from captioning.comparison.result import ONE_SEED, Cell, Group, Row, Table
from captioning.comparison.runs import Run
from captioning.evaluation.records import CaptionedImage
from captioning.metrics.bleu import bleu_metrics
from captioning.metrics.resampling import (
    LEVEL,
    Difference,
    Floats,
    Interval,
    Statistic,
    differences,
    holm,
    intervals,
    percentage,
)
from captioning.metrics.seeds import RULE, seed_differences
from captioning.metrics.table import METRICS, NOUN_METRICS, TITLES, count
from captioning.progress import Progress

_CORRECTED = (
    " Bold: interval and test agree on a difference. The p-values are corrected for the tests in this table (Holm); "
    "the intervals are not."
)
_VARIANTS = (
    "Mean and standard deviation of the runs that differ in their seed alone. Below: the difference from the first "
    "variant with its 95 % interval and p-value, over images and seeds (analysis of variance of Obuchowski and "
    f"Rockette; {RULE})."
)

_NEEDS_MODEL = [name for name, metric in METRICS.items() if metric.needs_model]

Key = tuple[str, str]
"""The names of a run or a variant, and of a metric."""


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


class Scored(NamedTuple):
    """A table of scores and the numbers in it."""

    table: Table
    tests: dict[Key, Difference]  # differences from the first run or variant, corrected for their number
    notices: list[str]  # sentences on what limits the tests
    scores: dict[Key, Interval]  # of runs


def score_runs(
    table: Table, measures: Sequence[Measure], compared: Sequence[str], *, resamples: int, seed: int
) -> Scored:
    """Fill a table without rows with the scores of its runs, and test the compared runs against the first one."""
    scores: dict[Key, Interval] = {}
    tests: dict[Key, Difference] = {}
    for measure in Progress(f"{table.title}: intervals", over=measures, unit=" metrics"):
        first = measure.counts.get(table.columns[0])
        for run, counts in () if measure.baseline else measure.counts.items():
            ends = intervals(counts, measure.values, resamples=resamples, seed=seed).reshape(3, -1).T.tolist()
            scores |= {(run, key): Interval(*three) for key, three in zip(measure.keys, ends, strict=True)}
            if run in compared and first is not None:
                changes = differences(first, counts, measure.values, resamples=resamples, seed=seed)
                tests |= {(run, key): change for key, change in zip(measure.keys, changes, strict=True)}
    tests = _corrected(tests)
    rows = [
        Row(TITLES[key], [_cell(measure, (run, key), scores, tests) for run in table.columns], measure.baseline)
        for measure in measures
        for key in measure.keys
    ]
    if "bleu4" in measures[0].keys:
        ratios = {run: bleu_metrics(counts.sum(axis=0))["length_ratio"] for run, counts in measures[0].counts.items()}
        rows.append(Row(TITLES["length_ratio"], [Cell.plain(ratios.get(run), "{:.3f}") for run in table.columns]))
    note = f"{_CORRECTED} The tests are over images; {ONE_SEED}." if tests else ""
    too_few = (
        f"{resamples} resamples are too few for {len(tests)} tests: no corrected p-value can be below "
        f"{LEVEL}; take at least {round(len(tests) / LEVEL)}."
    )
    notices = [too_few] if len(tests) / (resamples + 1) >= LEVEL else []
    return Scored(table._replace(rows=rows, note=table.note + note), tests, notices, scores)


def _cell(measure: Measure, key: Key, scores: Mapping[Key, Interval], tests: Mapping[Key, Difference]) -> Cell:
    counts = measure.counts.get(key[0])
    if counts is None:
        return Cell()
    if measure.baseline:
        return Cell.plain(float(measure.values(counts.sum(axis=0))), "{:.1f}")
    score, nouns = scores[key], f", {int(counts[:, 1].sum())} {measure.unit}" if measure.unit else ""
    return Cell.measured(score.value, f"{score.low:.1f} to {score.high:.1f}{nouns}", tests.get(key))


def score_variants(groups: Sequence[Group], measures: Sequence[Measure], *, tested: bool) -> Scored:
    """Return the means and deviations of variants ``with_scores``; if ``tested``, with tests over images and seeds."""
    measures = [measure for measure in measures if not measure.baseline]
    tests = _variant_tests(groups, measures) if tested else {}
    titles = {key: TITLES[key] for measure in measures for key in measure.keys}
    of_tests = [key for key in _NEEDS_MODEL if any(key in group.scores for group in groups)]
    titles |= {key: f"{TITLES[key]}, {METRICS[key].unit}" for key in of_tests}
    rows = [
        Row(title, [_variant_cell(group, key, tests.get((group.name, key))) for group in groups])
        for key, title in titles.items()
    ]
    table = Table("Variants over seeds", [group.name for group in groups], rows, _VARIANTS + _CORRECTED * bool(tests))
    single = [group.name for group in groups if len(group.runs) == 1]
    notice = f"One seed each: {', '.join(single)}. Differences from them are not tested over seeds."
    return Scored(table, tests, [notice] if single else [], {})


def _variant_tests(groups: Sequence[Group], measures: Sequence[Measure]) -> dict[Key, Difference]:
    """Return corrected tests of variants against the first one; both need several seeds and all counts."""
    tests: dict[Key, Difference] = {}
    for measure in measures:
        tested = [group for group in groups if len(group.runs) > 1 and measure.counts.keys() >= {*group.runs}]
        counts = [np.stack([measure.counts[run] for run in group.runs]) for group in tested]
        for group, group_counts in zip(tested[1:], counts[1:], strict=True) if groups[0] in tested else ():
            changes = seed_differences(counts[0], group_counts, measure.values)
            tests |= {(group.name, key): change for key, change in zip(measure.keys, changes, strict=True)}
    return _corrected(tests)


def _corrected(tests: Mapping[Key, Difference]) -> dict[Key, Difference]:
    return dict(zip(tests, holm(list(tests.values())), strict=True))


def with_scores(group: Group, measures: Sequence[Measure], runs: Sequence[Run], images: int) -> Group:
    """Return a variant with the scores of its runs; their tests have ``images`` in common."""
    members, scores = [run for run in runs if run.name in group.runs], dict[str, list[float]]()
    for measure in measures:
        if not measure.baseline and measure.counts.keys() >= set(group.runs):
            values = [np.atleast_1d(measure.values(measure.counts[run].sum(axis=0))) for run in group.runs]
            scores |= dict(zip(measure.keys, np.stack(values, axis=1).tolist(), strict=True))
    # The scores of a run's test are those of all its images.
    if not images or all(len(run.captions or ()) == images for run in members):
        of_tests = [key for key in _NEEDS_MODEL if all(key in run.scores for run in members)]
        scores |= {key: [run.scores[key] for run in members] for key in of_tests}
    return dataclasses.replace(group, scores=scores)


def _variant_cell(group: Group, key: str, test: Difference | None) -> Cell:
    if key not in group.scores:
        return Cell()
    deviation = group.deviation(key)
    detail = "" if deviation is None else f"deviation {deviation:.2f} of {len(group.runs)} seeds"
    return Cell.measured(group.mean(key), detail, test)
