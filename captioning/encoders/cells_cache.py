"""Cells that took long to measure, kept in the user's cache folder under the hash of the encoder that they are of."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

from captioning.cells import CellGrid
from captioning.errors import InputError
from captioning.files import cache_folder, write_json

_LONG = 1.0
"""Seconds; what is measured more quickly is not kept."""
_FORMAT = 1  # of the method: another one measures anew


def kept_cells(identity: Callable[[], dict[str, Any]], measure: Callable[[], CellGrid]) -> CellGrid:
    """Return what ``measure`` does, or did for an encoder of the same identity."""
    try:
        key = hashlib.sha256(json.dumps([_FORMAT, identity()], sort_keys=True).encode()).hexdigest()
    except TypeError:
        return measure()  # the encoder's arguments are no plain data, which nothing stands for
    path = cache_folder() / f"cells-{key[:32]}.json"
    # Not there, or damaged: measured anew.
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        return CellGrid(**{name: (pair[0], pair[1]) for name, pair in json.loads(path.read_text()).items()})
    begun = time.monotonic()
    cells = measure()
    if time.monotonic() - begun > _LONG:
        with contextlib.suppress(OSError, InputError):  # one that cannot write goes on without
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, dataclasses.asdict(cells))
    return cells
