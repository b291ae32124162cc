"""The result of a comparison: tables for a terminal and a page, and the numbers behind them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from captioning.comparison.runs import Curve
from captioning.metrics.resampling import Difference, Interval
from captioning.metrics.table import TITLES

ONE_SEED = "one seed each, so nothing follows about the method"
"""The end of every verdict over runs of one seed each: other seeds could order the methods differently."""


class TableCell(NamedTuple):
    """One cell of a table: a number as text, with details."""

    text: str = ""  # "" if it is missing
    detail: str = ""  # such as the interval
    change: str = ""  # the difference from the first run or variant
    is_clear: bool = False  # whether interval and test agree that there is a difference

    @classmethod
    def plain(cls, value: Any, pattern: str = "{}") -> TableCell:
        """Return a cell without details; it is empty for None and NaN."""
        return cls() if value is None or value != value else cls(pattern.format(value))

    @classmethod
    def measured(cls, value: float, detail: str, test: Difference | None) -> TableCell:
        change, is_clear = ("", False) if test is None else (change_text(test), test.is_clear)
        return cls(f"{value:.2f}", detail, change, is_clear)


def change_text(test: Difference) -> str:
    """Return a difference with its interval and p-value."""
    value, low, high = (f"{number:+.2f}" for number in vars(test.interval).values())
    p_value = f"p = {test.corrected_p_value:.3f}" if test.corrected_p_value > 0.001 else "p ≤ 0.001"
    return f"{'equal' if value in ('+0.00', '-0.00') else value} ({low} to {high}), {p_value}"


class Row(NamedTuple):
    """One line of a table. A baseline belongs to the row before it."""

    name: str
    cells: list[TableCell]
    is_baseline: bool = False


class Table(NamedTuple):
    """Rows with a cell for every one of ``columns``, which are runs or variants. The note explains the numbers."""

    title: str
    columns: list[str]
    rows: list[Row]
    note: str = ""


@dataclass
class Variant:
    """Runs that differ in their seed alone."""

    name: str  # not the name of a run, unless it is the only run of the variant
    runs: list[str]
    seeds: list[str]  # as text; "" for an unknown seed
    metrics: dict[str, list[float]] = field(default_factory=dict)  # by name, the values of the runs

    def mean(self, metric: str) -> float:
        return statistics.fmean(self.metrics[metric])

    def deviation(self, metric: str) -> float | None:
        """Return the standard deviation over seeds (n - 1); None for one seed."""
        values = self.metrics[metric]
        if not all(map(math.isfinite, values)):
            return math.nan
        return statistics.stdev(values) if len(values) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Return the runs, their seeds and their metrics as plain data for JSON."""
        metrics = {
            name: {"mean": self.mean(name), "deviation": self.deviation(name), "values": values}
            for name, values in self.metrics.items()
        }
        return {"runs": self.runs, "seeds": self.seeds, "metrics": metrics}


@dataclass
class Disagreement:
    """An image that the runs caption differently."""

    image_id: int
    captions: dict[str, str]  # by run
    metrics: dict[str, float]  # by run, the metric of its caption in percent
    references: list[str]
    file: str = ""  # name of the image's file; "" if it is not known

    @property
    def name(self) -> str:
        return f"{self.file}, image {self.image_id}" if self.file else f"image {self.image_id}"


@dataclass
class Comparison:
    """The result of ``captioning.comparison.compare.compare_runs``."""

    variant_runs: list[list[str]]  # for each variant the names of its runs; all are compared with the very first run
    metric: str  # name of the metric of verdicts and of single images
    notices: list[str] = field(default_factory=list)  # sentences on what limits the comparison
    tables: list[Table] = field(default_factory=list)  # the most important first
    intervals: dict[str, dict[str, Interval]] = field(default_factory=dict)  # by run and metric
    tests: dict[str, dict[str, Difference]] = field(default_factory=dict)
    """By run and metric, the difference from the first run, corrected for the tests of its table."""
    variants: list[Variant] = field(default_factory=list)  # with captions; empty if every run is a variant of its own
    variant_tests: dict[str, dict[str, Difference]] = field(default_factory=dict)
    """As ``tests``, by variant: the difference of the means over seeds, tested over images and seeds."""
    curves: Mapping[str, Mapping[str, Curve]] = field(default_factory=dict)  # by log key and run
    disagreements: list[Disagreement] = field(default_factory=list)  # where the runs' metrics differ most
    image_count: int = 0  # number of images that all runs captioned

    @property
    def runs(self) -> list[str]:
        return [run for runs in self.variant_runs for run in runs]

    @property
    def verdicts(self) -> dict[str, str]:
        """A sentence for each tested variant and run. Only a variant can have a clear difference."""
        by_run = {name: _run_verdict(self, name, tests[self.metric]) for name, tests in self.tests.items()}
        variant_tests = self.variant_tests.items()
        return {name: _variant_verdict(self, name, tests[self.metric]) for name, tests in variant_tests} | by_run

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain data for JSON."""
        return {
            "runs": self.runs,
            "metric": self.metric,
            "images": self.image_count,
            "verdicts": list(self.verdicts.values()),
            "notices": self.notices,
            "intervals": {run: {name: vars(x) for name, x in of_run.items()} for run, of_run in self.intervals.items()},
            "differences": {run: _tests_to_dict(tests) for run, tests in self.tests.items()},
            "variants": {variant.name: variant.to_dict() for variant in self.variants},
            "variant_differences": {name: _tests_to_dict(tests) for name, tests in self.variant_tests.items()},
            "disagreements": [vars(item) for item in self.disagreements],
        }


def _tests_to_dict(tests: Mapping[str, Difference]) -> dict[str, dict[str, float]]:
    return {
        name: {**vars(test.interval), "p_value": test.p_value, "corrected_p_value": test.corrected_p_value}
        for name, test in tests.items()
    }


def _run_verdict(result: Comparison, name: str, test: Difference) -> str:
    after, before = (f"{run} {result.intervals[run][result.metric].value:.1f}" for run in (name, result.runs[0]))
    result_text = f"on these {result.image_count} images, {change_text(test)}"
    return f"{TITLES[result.metric]}: {after}, {before} {result_text}; {ONE_SEED}."


def _variant_verdict(result: Comparison, name: str, test: Difference) -> str:
    first, (second,) = result.variants[0], [variant for variant in result.variants if variant.name == name]
    before, after = (f"{variant.mean(result.metric):.1f}" for variant in (first, second))
    seeds = f"{len(second.runs)} + {len(first.runs)} seeds"
    result_text = f"{TITLES[result.metric]}, {change_text(test)}; {result.image_count} images, {seeds}."
    return f"{conclusion(test)}: {name} has {after} and {first.name} {before} {result_text}"


def conclusion(test: Difference) -> str:
    """Return a test's result in words; a difference is clear only if interval and test agree."""
    if test.is_clear:
        return "Clear difference"
    if test.excludes_zero or test.is_significant:
        return "Weak evidence of a difference (interval and test disagree)"
    return "No clear difference"
