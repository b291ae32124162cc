"""Scores of runs on the images that all of them captioned: intervals, and tests against the first run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from captioning.comparison.result import Cell, Comparison, Row, Table, with_best
from captioning.comparison.verdicts import ONE_SEED
from captioning.evaluation.records import CaptionedImage
from captioning.evaluation.resampling import (
    LEVEL,
    Difference,
    Floats,
    Interval,
    Statistic,
    differences,
    holm,
    intervals,
)

CORRECTED = " Bold: clearly best. The p-values are corrected for the tests in this table (Holm); the intervals are not."


@dataclass(frozen=True)
class Scored:
    """What the tested runs are scored on, and how it is resampled for every interval and test.

    Attributes:
        captions: By run and image id.
        common: Ids of the images that all runs captioned. Without any, a run is scored on its own images.
        compared: The runs that are tested against the first one by one.
        resamples: Of the images, for every interval and test.
        seed: Seed of the resampling.
    """

    captions: dict[str, dict[int, CaptionedImage]]
    common: list[int]
    compared: list[str]
    resamples: int
    seed: int

    def images(self) -> Iterator[tuple[str, dict[int, CaptionedImage], list[int]]]:
        """Yield the name, the captions and the ids of the scored images of every run."""
        return ((name, captions, self.common or sorted(captions)) for name, captions in self.captions.items())


class Measure(NamedTuple):
    """Scores that are functions of the same counts.

    Attributes:
        keys: Names of the S scores in files.
        titles: Names of the S scores in tables.
        counts: By run, (images, C).
        scores: From counts summed over images, (.., C), to percent, (.., S) or (..) of a single score.
        baseline: Whether it is what a run would score without looking at its captions; baselines are not tested.
        unit: What the second column of the counts counts, shown beside a score.
    """

    keys: tuple[str, ...]
    titles: tuple[str, ...]
    counts: dict[str, Floats]
    scores: Statistic
    baseline: bool = False
    unit: str = ""


def titles_of(measures: Sequence[Measure]) -> dict[str, str]:
    """Return the names of all scores in tables by their names in files."""
    return {key: title for measure in measures for key, title in zip(measure.keys, measure.titles, strict=True)}


def common_images(tested: dict[str, dict[int, CaptionedImage]], result: Comparison) -> list[int]:
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


def add_score_table(result: Comparison, scored: Scored, measures: Sequence[Measure], title: str, note: str) -> Table:
    """Add a table of measures, and the intervals and tests behind it. The tests are corrected for their number."""
    first = result.runs[0]
    options = {"resamples": scored.resamples, "seed": scored.seed}
    tests: dict[tuple[str, str], Difference] = {}
    for measure in [measure for measure in measures if first in measure.counts and not measure.baseline]:
        for run in [run for run in scored.compared if run in measure.counts]:
            tested = differences(measure.counts[first], measure.counts[run], measure.scores, **options)
            tests |= {(run, key): test for key, test in zip(measure.keys, tested, strict=True)}
    for (run, key), corrected in zip(tests, holm(list(tests.values())), strict=True):
        result.tests.setdefault(run, {})[key] = corrected
    if len(tests) / (scored.resamples + 1) >= LEVEL:
        result.notices.append(
            f"{scored.resamples} resamples are too few for {len(tests)} tests: no corrected p-value can be below "
            f"{LEVEL}; take at least {round(len(tests) / LEVEL)}."
        )
    rows = [row for measure in measures for row in _rows(result, measure, options)]
    note += (f"{CORRECTED} The tests are over images; {ONE_SEED}.") * bool(tests)
    result.tables.append(Table(title, rows, note))
    return result.tables[-1]


def _rows(result: Comparison, measure: Measure, options: dict[str, int]) -> Iterator[Row]:
    if measure.baseline:
        values = {run: float(measure.scores(counts.sum(axis=0))) for run, counts in measure.counts.items()}
        yield Row(measure.titles[0], [Cell.plain(values.get(run), "{:.1f}") for run in result.runs], baseline=True)
        return
    for run, counts in measure.counts.items():
        bounds = intervals(counts, measure.scores, **options).reshape(3, -1).T
        for key, ends in zip(measure.keys, bounds, strict=True):
            result.scores.setdefault(run, {})[key] = Interval(*map(float, ends))
    for key, title in zip(measure.keys, measure.titles, strict=True):
        yield Row(title, with_best([_cell(result, measure, key, run) for run in result.runs]))


def _cell(result: Comparison, measure: Measure, key: str, run: str) -> Cell:
    interval = result.scores.get(run, {}).get(key)
    if interval is None:
        return Cell("")
    of = f", {int(measure.counts[run][:, 1].sum())} {measure.unit}" if measure.unit else ""
    detail = f"{interval.low:.1f} to {interval.high:.1f}{of}"
    return Cell.measured(interval.value, detail, result.tests.get(run, {}).get(key))
