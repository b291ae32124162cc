"""What a comparison of runs has found: rows of text for a terminal, a page or a report, and the numbers behind them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from captioning.comparison.runs import Curve
from captioning.evaluation.resampling import Difference, Interval


@dataclass(frozen=True)
class Cell:
    """A number as it is shown.

    Attributes:
        text: the number; "" if it is missing.
        detail: its interval, its step and the like.
        change: how it differs from the first run's.
        clear: interval and test of the change agree that there is one.
        best: no other run's is better.
        value: the number itself; None for a text.
        between: the ends of its 95 % interval.
    """

    text: str
    detail: str = ""
    change: str = ""
    clear: bool = False
    best: bool = False
    value: float | None = None
    between: tuple[float, float] | None = None


@dataclass(frozen=True)
class Row:
    """One measure of all runs. A baseline belongs to the row before it."""

    name: str
    cells: list[Cell]
    baseline: bool = False


@dataclass(frozen=True)
class Table:
    """Measures, a row each.

    Attributes:
        columns: what a row has a cell of each; None: the runs.
    """

    title: str
    rows: list[Row]
    note: str = ""
    columns: list[str] | None = None


@dataclass
class Group:
    """Runs that differ in their seed alone: one variant.

    Attributes:
        name: unlike any run's, unless it is the group's only one.
        runs: their names, in the order of the seeds.
        seeds: as text; "" where a run's is not known.
        scores: by measure, the values of the runs.
    """

    name: str
    runs: list[str]
    seeds: list[str]
    scores: dict[str, list[float]] = field(default_factory=dict)

    def mean(self, measure: str) -> float:
        return statistics.fmean(self.scores[measure])

    def deviation(self, measure: str) -> float | None:
        """The standard deviation over seeds (n - 1); None of one seed."""
        values = self.scores[measure]
        return statistics.stdev(values) if len(values) > 1 else None


@dataclass(frozen=True)
class Disagreement:
    """An image that the runs caption differently: by run its caption and the caption's own score in percent."""

    image_id: int
    captions: dict[str, str]
    scores: dict[str, float]
    references: list[str]

    @property
    def reference_words(self) -> set[str]:
        return {word for reference in self.references for word in reference.split()}


@dataclass
class Comparison:
    """What ``captioning.comparison.compare.compare`` found.

    Attributes:
        runs: their names; the first is what the others are compared with.
        metric: one of ``evaluation.scores.NAMES``, of verdicts and the scores of single images.
        verdicts: by run but the first, or by group of several, how its metric differs from the first one's.
        notices: sentences on what limits the comparison.
        tables: in the order of interest.
        settings: the settings that differ.
        scores: by run and name, the intervals of its captions' scores.
        tests: by run that is compared with the first, and by measure, the difference; corrected within each table.
        groups: the variants, first that of the first tested run; empty where every run is a variant of its own.
        group_tests: as ``tests``, by group: the difference of the means over seeds, tested over images and seeds.
        curves: by log key, the curves of the runs that have it.
        disagreements: the images where the runs differ most, first the largest difference of sentence scores.
        images: the number of images that all runs are scored on; 0 if they have none in common.
    """

    runs: list[str]
    metric: str
    verdicts: dict[str, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    settings: Table = field(default_factory=lambda: Table("Settings that differ", []))
    scores: dict[str, dict[str, Interval]] = field(default_factory=dict)
    tests: dict[str, dict[str, Difference]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    group_tests: dict[str, dict[str, Difference]] = field(default_factory=dict)
    curves: Mapping[str, Mapping[str, Curve]] = field(default_factory=dict)
    disagreements: list[Disagreement] = field(default_factory=list)
    images: int = 0

    def columns(self, table: Table) -> list[str]:
        return self.runs if table.columns is None else table.columns

    def clear(self, name: str) -> bool:
        """Whether the metric of a run or a group clearly differs from the first one's."""
        return (self.group_tests.get(name) or self.tests[name])[self.metric].clear

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain data for JSON."""
        return {
            "runs": self.runs,
            "metric": self.metric,
            "images": self.images,
            "verdicts": list(self.verdicts.values()),
            "notices": self.notices,
            "intervals": {
                run: {name: vars(interval) for name, interval in found.items()} for run, found in self.scores.items()
            },
            "differences": {run: _plain(tests) for run, tests in self.tests.items()},
            "groups": {
                group.name: {
                    "runs": group.runs,
                    "seeds": group.seeds,
                    "scores": {
                        name: {"mean": group.mean(name), "deviation": group.deviation(name), "values": values}
                        for name, values in group.scores.items()
                    },
                }
                for group in self.groups
            },
            "group_differences": {group: _plain(tests) for group, tests in self.group_tests.items()},
            "tables": {
                table.title: {
                    row.name: {
                        run: cell.text if cell.value is None else cell.value
                        for run, cell in zip(self.columns(table), row.cells, strict=True)
                    }
                    for row in table.rows
                }
                for table in [*self.tables, self.settings]
            },
            "disagreements": [vars(item) for item in self.disagreements],
        }


def _plain(tests: Mapping[str, Difference]) -> dict[str, dict[str, float]]:
    return {
        name: {**vars(test.interval), "p_value": test.p_value, "corrected_p_value": test.corrected}
        for name, test in tests.items()
    }
