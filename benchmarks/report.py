"""The results of a benchmark, as tables and as one JSON file."""

from __future__ import annotations

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
        items: Number of items that the time covers; None if nothing is counted.
        unit: Name of these items.
        other_name: Name of what ``other`` timed.
    """

    name: str
    description: str
    ours: Timing
    other: Timing | None = None
    items: int | None = None
    unit: str = "images"
    other_name: str = "common_port"


@dataclass
class Report:
    """The results of one or several subjects.

    Attributes:
        rows: In the order of measuring.
    """

    rows: list[Row] = field(default_factory=list)

    def extend(self, report: Report) -> None:
        """Add the results of another report."""
        self.rows += report.rows

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, numbers by row name.

        ``seconds`` holds medians and ``spread`` quartiles. ``vs_NAME`` is how many times as fast as NAME we are,
        such as ``vs_common_port``.
        """
        seconds = {row.name: row.ours.median for row in self.rows}
        spread = {row.name: list(row.ours.quartiles) for row in self.rows}
        compared = [(row, row.other) for row in self.rows if row.other is not None]
        ratios: dict[str, dict[str, float]] = {"vs_common_port": {}}
        for row, other in compared:
            ratios.setdefault(f"vs_{row.other_name}", {})[row.name] = row.ours.speedup_over(other)
        others = {f"{row.name}_{row.other_name}": other for row, other in compared}
        return {
            **ratios,
            "seconds": seconds | {name: other.median for name, other in others.items()},
            "spread": spread | {name: list(other.quartiles) for name, other in others.items()},
            "per_second": {
                row.name: {row.unit: row.items / row.ours.median} for row in self.rows if row.items is not None
            },
            "sizes": {row.name: row.description for row in self.rows},
        }

    def table(self) -> Table:
        """Return a table of times."""
        times = Table(title="time: median (quartiles); ratios compare within a round")
        times.add_column("subject", overflow="fold")
        for column in ("ours", "per second", "compared with", "times as fast"):
            times.add_column(column, justify="right")
        for row in self.rows:
            times.add_row(
                f"[bold]{row.name}[/bold]\n{row.description}",
                _spread(row.ours),
                "" if row.items is None else f"{row.items / row.ours.median:,.1f} {row.unit}",
                *(("", "") if row.other is None else (_other(row), f"{row.ours.speedup_over(row.other):.2f}")),
            )
        return times


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 10 else f"{1000 * value:,.1f} ms"


def _other(row: Row) -> str:
    assert row.other is not None
    return f"{row.other_name.replace('_', ' ')}\n{_spread(row.other)}"


def _spread(timing: Timing) -> str:
    low, high = timing.quartiles
    return f"{_seconds(timing.median)} ({_seconds(low)} - {_seconds(high)})"
