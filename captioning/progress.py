"""Progress of a long task: rich's bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time

from captioning.errors import printable


class Progress:
    """Shows on standard output how much of a task is done. A context manager.

    Args:
        label: Name of the task.
        total: Units of the whole task; None if unknown.
        done: Units that were done before.
        unit: What is counted. "bytes" are shown as MB.
    """

    def __init__(self, label: str, total: int | None = None, done: int = 0, *, unit: str = "images") -> None:
        self.label, self.total, self.done, self.unit = printable(label), total, done, unit
        self._started = self._printed = time.monotonic()
        self._bar = None
        if sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # slow to import

            self._bar = Progress(TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.add_task(self._line(), total=self.total, completed=self.done)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int) -> None:
        """Show that ``done`` units of the whole task are done."""
        self.done, now = done, time.monotonic()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, description=self._line())
        elif now - self._printed > max(10, 0.05 * (now - self._started)):  # seconds
            self._printed = now
            self.say(self._line())

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        print(printable(line), flush=True)  # rich redirects it

    def _line(self) -> str:
        numbers = [self.done] if self.total is None else [self.done, self.total]
        scale, unit = (1e6, "MB") if self.unit == "bytes" else (1, self.unit)
        return f"{self.label}: {' of '.join(f'{number / scale:,.0f}' for number in numbers)} {unit}"
