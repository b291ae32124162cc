"""Cells that took long to measure, kept in the user's cache folder under the hash of the encoder that they are of."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from captioning.cells import CellGrid
from captioning.errors import InputError
from captioning.files import write_json

_LONG = 1.0
"""Seconds; what is measured more quickly is not kept."""
_FORMAT = 1  # of the method: another one measures anew


def kept_cells(identity: Callable[[], dict[str, Any]], measure: Callable[[], CellGrid]) -> CellGrid:
    """Return what ``measure`` does, or did for an encoder of the same identity."""
    try:
        key = hashlib.sha256(json.dumps([_FORMAT, identity()], sort_keys=True).encode()).hexdigest()
    except TypeError:
        return measure()  # the encoder's arguments are no plain data, which nothing stands for
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "captioning"
    path = folder / f"cells-{key[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not there, or damaged: measured anew
        found = json.loads(path.read_text())
        pairs = {name: (found[name][0], found[name][1]) for name in ("grid_size", "offset", "stride", "size")}
        return CellGrid(**pairs)
    begun = time.monotonic()
    cells = measure()
    if time.monotonic() - begun > _LONG:
        content = {name: getattr(cells, name) for name in ("grid_size", "offset", "stride", "size")}
        with contextlib.suppress(OSError, InputError):  # one that cannot write goes on without
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, content)
    return cells
