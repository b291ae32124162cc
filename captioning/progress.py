"""Progress of a long task: rich's bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

from captioning.errors import printable

if TYPE_CHECKING:
    from rich import progress as bars

_SECONDS_BETWEEN_LINES = 10.0
_LINES_OF_A_LONG_TASK = 0.05  # of the time so far: the lines of a task of hours lie further apart


def size_text(size: float) -> str:
    """Return a size in bytes as text, such as "12.3 MB"."""
    from rich.filesize import decimal  # here, because help needs none of rich

    return decimal(int(size))


class Progress:
    """Shows how much of a task is done. A context manager.

    Args:
        label: Name of the task.
        total: Units of the whole task; None if unknown.
        done: Units that were done before. They do not count in the rate.
        unit: What is counted. "bytes" are shown as kB, MB and GB.
        stream: Where to show it, standard output by default.
        shown: Whether to show more than the lines of ``say``.
    """

    def __init__(
        self,
        label: str,
        total: int | None = None,
        done: int = 0,
        *,
        unit: str = "images",
        stream: TextIO | None = None,
        shown: bool = True,
    ) -> None:
        self.label, self.total, self.done, self.unit = printable(label), total, done, unit
        self.first, self._shown, self._stream = done, shown, stream or sys.stdout
        self._started = self._printed = time.monotonic()
        self._bar = self._make_bar() if shown and self._stream.isatty() else None

    def _make_bar(self) -> bars.Progress:
        from rich import progress as bars  # slow to import, and help needs none of it
        from rich.console import Console

        return bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.TextColumn("{task.fields[count]}"),
            bars.TimeElapsedColumn() if self.total is None else bars.TimeRemainingColumn(),
            console=Console(file=self._stream, markup=False, emoji=False, highlight=False, soft_wrap=True),
            redirect_stdout=self._stream is sys.stdout,  # else it leads to a file or another program
        )

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.add_task(self.label, total=self.total, completed=self.done, count=self._count())
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int) -> None:
        """Show that ``done`` units of the whole task are done."""
        self.done = done
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, count=self._count())
        elif self._shown and self._is_time_for_a_line():
            self._printed = time.monotonic()
            self.say(f"{self.label}: {self._count()}{self._left()}")

    def _is_time_for_a_line(self) -> bool:
        now = time.monotonic()
        return now - self._printed > max(_SECONDS_BETWEEN_LINES, _LINES_OF_A_LONG_TASK * (now - self._started))

    def _left(self) -> str:
        """Return such as ", 4:10 left" at the rate so far; "" if that is unknown."""
        if self.total is None or self.done <= self.first:
            return ""
        seconds = (time.monotonic() - self._started) * (self.total - self.done) / (self.done - self.first)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f", {hours}:{minutes:02}:{seconds:02} left" if hours else f", {minutes}:{seconds:02} left"

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(printable(line))
        else:
            print(printable(line), file=self._stream, flush=True)

    def rate(self) -> str:
        """Return such as "12.3 images/s"."""
        speed = (self.done - self.first) / max(1e-9, time.monotonic() - self._started)
        return f"{size_text(speed)}/s" if self.unit == "bytes" else f"{speed:.1f} {self.unit}/s"

    def _count(self) -> str:
        numbers = [self.done] if self.total is None else [self.done, self.total]
        if self.unit == "bytes":
            return f"{' of '.join(map(size_text, numbers))}, {self.rate()}"
        return f"{' of '.join(f'{number:,}' for number in numbers)} {self.unit}, {self.rate()}"
