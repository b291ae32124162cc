"""Progress of a long task on standard error: a bar that is drawn again as it grows, every 30 s in a log."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from captioning.errors import printable


class Progress(tqdm):
    """A tqdm bar and context manager. ``update(n)`` counts n units; a loop over the bar counts each item.

    Args:
        label: Name of the task.
        total: Units of the whole task; None if unknown.
        done: Units that were done before.
        over: What a loop over the bar yields; each item is a unit.
        unit: What is counted. "B", bytes, are shown as kB, MB ..
    """

    monitor_interval = 0  # start no thread: data loaders fork processes

    def __init__(self, label: str, total: Any = None, done: int = 0, over: Any = None, unit: str = " images") -> None:
        seconds = 0.1 if sys.stderr.isatty() else 30
        options = {"unit": unit, "unit_scale": unit == "B", "mininterval": seconds, "maxinterval": seconds}
        super().__init__(over, desc=printable(label), total=total, initial=done, dynamic_ncols=True, **options)
