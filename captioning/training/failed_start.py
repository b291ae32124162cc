"""What a run that fails before its first step leaves behind: nothing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def removes_what_a_failed_start_wrote(folder: Path, begun: Callable[[], bool]) -> Iterator[None]:
    """Remove what was written into a run's folder, and the folder if it is empty then, where the run never began.

    What was there before stays.

    Args:
        begun: asked after an error; True keeps everything.
    """
    before = set(_entries(folder))
    try:
        yield
    except BaseException:
        if not begun():
            for entry in _entries(folder):
                if entry not in before:
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            with contextlib.suppress(OSError):  # something of the user's is in it, or it is not there
                folder.rmdir()
        raise


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
