"""What was measured, as one table and as one JSON file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks.timing import Timing


class Row(NamedTuple):
    """One thing that was measured.

    Attributes:
        name: its key in the JSON file.
        what: sizes and circumstances, for people.
        ours: how long this project takes for it.
        port: how long the common port takes for the same; None where it has nothing like it.
        limit: seconds that the same work takes at the machine's measured speed; None where that says nothing.
        soft: how long soft attention takes for the same; None where it is soft attention's.
        one_row: how long the same takes with one row per caption; None where that is not compared.
        earlier: how long an earlier version takes for the same; None where there is none.
        images: how many images (of a training step: captions) the time is for; None where it is not for any.
        import_torch: how long a process takes that imports torch and nothing else; None where no process is timed.
    """

    name: str
    what: str
    ours: Timing
    port: Timing | None = None
    limit: float | None = None
    soft: Timing | None = None
    one_row: Timing | None = None
    earlier: Timing | None = None
    images: int | None = None
    import_torch: Timing | None = None


@dataclass
class Report:
    """What was measured.

    Attributes:
        rows: in the order of measuring.
        peak_memory: bytes by name.
        shares: by name, fractions of a whole.
        machine: the machine's speeds.
        rates: figures per second by name.
        memory_over_time: bytes at the end of each round, by name.
        scaled: seconds on another machine by name: not measured, but calculated from what was.
    """

    rows: list[Row] = field(default_factory=list)
    peak_memory: dict[str, int] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    machine: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    memory_over_time: dict[str, list[int]] = field(default_factory=dict)
    scaled: dict[str, float] = field(default_factory=dict)

    def extend(self, other: Report) -> None:
        self.rows += other.rows
        self.peak_memory |= other.peak_memory
        self.shares |= other.shares
        self.machine |= other.machine
        self.rates |= other.rates
        self.memory_over_time |= other.memory_over_time
        self.scaled |= other.scaled

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, numbers by row name.

        ``seconds`` holds medians and ``spread`` their quartiles; ``vs_common_port`` says how many times as fast as the
        port we are (of memory: how many times less), ``vs_limit`` how many times the limit we take,
        ``vs_soft`` how many times what soft attention takes, ``vs_one_row`` what one row per caption takes,
        ``vs_earlier`` what an earlier version takes, ``vs_import_torch`` what a process takes that imports torch.
        """
        ours = {row.name: row for row in self.rows}
        seconds = {name: row.ours.median for name, row in ours.items()}
        spread = {name: list(row.ours.quartiles) for name, row in ours.items()}
        for name, row in ours.items():
            if row.port is not None:
                seconds[f"{name}_common_port"] = row.port.median
                spread[f"{name}_common_port"] = list(row.port.quartiles)
            if row.limit is not None:
                seconds[f"{name}_limit"] = row.limit
        memory = {
            name: self.peak_memory[f"{name}_common_port"] / size
            for name, size in self.peak_memory.items()
            if size and f"{name}_common_port" in self.peak_memory
        }
        return {
            "vs_common_port": {name: row.ours.ratio(row.port) for name, row in ours.items() if row.port is not None}
            | {f"memory_{name}": ratio for name, ratio in memory.items()},
            "vs_limit": {name: row.ours.median / row.limit for name, row in ours.items() if row.limit is not None},
            "vs_soft": {name: row.soft.ratio(row.ours) for name, row in ours.items() if row.soft is not None},
            "vs_import_torch": {
                name: row.import_torch.ratio(row.ours) for name, row in ours.items() if row.import_torch is not None
            },
            "vs_one_row": {name: row.one_row.ratio(row.ours) for name, row in ours.items() if row.one_row is not None},
            "vs_earlier": {name: row.earlier.ratio(row.ours) for name, row in ours.items() if row.earlier is not None},
            "seconds": seconds,
            "spread": spread,
            "images_per_second": {
                name: row.images / row.ours.median for name, row in ours.items() if row.images is not None
            },
            "peak_memory": self.peak_memory,
            "shares": self.shares,
            "rates": self.rates,
            "memory_over_time": self.memory_over_time,
            "scaled": self.scaled,
            "machine": self.machine,
            "sizes": {name: row.what for name, row in ours.items()},
        }

    def tables(self) -> Iterable[Table]:
        """Return a table of times, one of memory and shares, and one of the machine, as far as there are any."""
        times = Table(title="time: median (quartiles); ratios compare within a round")
        times.add_column("what", overflow="fold")
        columns = ["ours", "per second", "common port", "times as fast", "limit", "times the limit", "times soft"]
        columns += ["times one row", "times earlier", "times import torch"]
        for column in columns:
            times.add_column(column, justify="right")
        for row in self.rows:
            times.add_row(
                f"[bold]{row.name}[/bold]\n{row.what}",
                _spread(row.ours),
                "" if row.images is None else f"{row.images / row.ours.median:,.1f}",
                "" if row.port is None else _spread(row.port),
                "" if row.port is None else f"{row.ours.ratio(row.port):.2f}",
                "" if row.limit is None else _seconds(row.limit),
                "" if row.limit is None else f"{row.ours.median / row.limit:.2f}",
                *(
                    "" if than is None else f"{than.ratio(row.ours):.2f}"
                    for than in (row.soft, row.one_row, row.earlier, row.import_torch)
                ),
            )
        if self.rows:
            yield times
        if self.peak_memory or self.shares or self.rates:
            rest = Table(title="memory, shares, rates, and what follows for other machines")
            rest.add_column("what")
            rest.add_column("value", justify="right")
            for name, size in self.peak_memory.items():
                rest.add_row(f"peak memory: {name}", f"{size / 2**20:,.0f} MiB")
            for name, share in self.shares.items():
                rest.add_row(name, f"{100 * share:.1f} %" if share >= 0.0005 else f"{share:.1e}")
            for name, rate in self.rates.items():
                rest.add_row(name, f"{rate:,.0f} / s")
            for name, sizes in self.memory_over_time.items():
                rest.add_row(f"memory over time: {name}", f"{', '.join(f'{size / 2**20:,.0f}' for size in sizes)} MiB")
            for name, seconds in self.scaled.items():
                rest.add_row(f"calculated: {name}", _seconds(seconds))
            yield rest
        if self.machine:
            machine = Table(title="the machine, measured")
            machine.add_column("what")
            machine.add_column("per second", justify="right")
            for name, rate in self.machine.items():
                machine.add_row(name, f"{rate / 1e9:,.1f} G")
            yield machine


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 10 else f"{1000 * value:,.1f} ms"


def _spread(timing: Timing) -> str:
    low, high = timing.quartiles
    return f"{_seconds(timing.median)} ({_seconds(low)} - {_seconds(high)})"
