"""Progress of a long task on standard error: a bar that grows in a terminal, a line every 30 s in a log."""

import sys
from typing import Any

from tqdm import tqdm

from captioning.errors import printable


class Progress(tqdm):
    """A tqdm bar over ``total`` units, of which ``done`` are finished at the start. ``update(n)`` adds n units.

    Iterating yields ``items``, one unit each. The unit "B", bytes, is shown as kB, MB ..
    """

    monitor_interval = 0  # start no thread: data loaders fork processes

    def __init__(self, label: str, total: Any = None, done: int = 0, items: Any = None, unit: str = " images") -> None:
        seconds = 0.1 if sys.stderr.isatty() else 30
        options = {"unit": unit, "unit_scale": unit == "B", "mininterval": seconds, "maxinterval": seconds}
        options |= {"dynamic_ncols": True, "disable": items is not None and not items}
        super().__init__(items, desc=printable(label), total=total, initial=done, **options)
