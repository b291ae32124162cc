"""The results of a benchmark, as tables and as one JSON file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks.timing import Timing


class Row(NamedTuple):
    """One measured time.

    Attributes:
        name: Key in the JSON file.
        description: Sizes and circumstances.
        ours: Time of this project.
        other: Time of what it is compared with; None if there is nothing.
        limit: Seconds that the same work takes at the machine's measured speed; None if no work was counted.
        items: Number of items that the time covers; None if nothing is counted.
        unit: Name of these items.
        other_name: Name of what ``other`` timed.
    """

    name: str
    description: str
    ours: Timing
    other: Timing | None = None
    limit: float | None = None
    items: int | None = None
    unit: str = "images"
    other_name: str = "common_port"


@dataclass
class Report:
    """The results of one or several subjects.

    Attributes:
        rows: In the order of measuring.
        fractions: ProcessFactors of a time, 0 to 1, by name.
        machine: Measured speeds of the machine, per second, by name.
    """

    rows: list[Row] = field(default_factory=list)
    fractions: dict[str, float] = field(default_factory=dict)
    machine: dict[str, float] = field(default_factory=dict)

    def extend(self, report: Report) -> None:
        """Add the results of another report."""
        self.rows += report.rows
        self.fractions |= report.fractions
        self.machine |= report.machine

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, numbers by row name.

        ``seconds`` holds medians and ``spread`` quartiles. ``vs_NAME`` is how many times as fast as NAME we are,
        such as ``vs_common_port``; ``vs_limit`` is how many times the limit we take.
        """
        seconds = {row.name: row.ours.median for row in self.rows}
        spread = {row.name: list(row.ours.quartiles) for row in self.rows}
        compared = [(row, row.other) for row in self.rows if row.other is not None]
        ratios: dict[str, dict[str, float]] = {"vs_common_port": {}}
        for row, other in compared:
            ratios.setdefault(f"vs_{row.other_name}", {})[row.name] = row.ours.speedup_over(other)
        others = {f"{row.name}_{row.other_name}": other for row, other in compared}
        limits = {row.name: row.limit for row in self.rows if row.limit is not None}
        return {
            **ratios,
            "vs_limit": {name: seconds[name] / limit for name, limit in limits.items()},
            "seconds": seconds
            | {name: other.median for name, other in others.items()}
            | {f"{name}_limit": limit for name, limit in limits.items()},
            "spread": spread | {name: list(other.quartiles) for name, other in others.items()},
            "per_second": {
                row.name: {row.unit: row.items / row.ours.median} for row in self.rows if row.items is not None
            },
            "fractions": self.fractions,
            "machine": self.machine,
            "sizes": {row.name: row.description for row in self.rows},
        }

    def tables(self) -> Iterable[Table]:
        """Yield a table of times, then one of fractions and the machine's speeds, unless they are empty."""
        if self.rows:
            times = Table(title="time: median (quartiles); ratios compare within a round")
            times.add_column("subject", overflow="fold")
            for column in ("ours", "per second", "compared with", "times as fast", "limit", "times the limit"):
                times.add_column(column, justify="right")
            for row in self.rows:
                times.add_row(
                    f"[bold]{row.name}[/bold]\n{row.description}",
                    _spread(row.ours),
                    "" if row.items is None else f"{row.items / row.ours.median:,.1f} {row.unit}",
                    *(("", "") if row.other is None else (_other(row), f"{row.ours.speedup_over(row.other):.2f}")),
                    *(("", "") if row.limit is None else (_seconds(row.limit), f"{row.ours.median / row.limit:.2f}")),
                )
            yield times
        if self.fractions or self.machine:
            values = Table(title="fractions of a time, and the speed of the machine")
            values.add_column("subject")
            values.add_column("value", justify="right")
            for name, fraction in self.fractions.items():
                values.add_row(name, f"{100 * fraction:.1f} %")
            for name, rate in self.machine.items():
                values.add_row(name, f"{rate / 1e9:,.1f} G/s")
            yield values


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 10 else f"{1000 * value:,.1f} ms"


def _other(row: Row) -> str:
    assert row.other is not None
    return f"{row.other_name.replace('_', ' ')}\n{_spread(row.other)}"


def _spread(timing: Timing) -> str:
    low, high = timing.quartiles
    return f"{_seconds(timing.median)} ({_seconds(low)} - {_seconds(high)})"
