"""The layout of a run's folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.platform != "win32":
    import fcntl


class RunFolder:
    """RUNS/NAME, the folder of a training run. Any of its files may be missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"  # the full configuration
        self.checkpoints = path / "checkpoints"

    @classmethod
    def of(cls, checkpoint: str | Path) -> RunFolder | None:
        """Return RUNS/NAME of RUNS/NAME/checkpoints/x.ckpt or of a link to it, None for a file elsewhere.

        The path is relative if the folder is below the current one.
        """
        for file in (Path(os.path.abspath(checkpoint)), Path(checkpoint).resolve()):
            if file.parent.name == "checkpoints":
                folder = file.parent.parent
                return cls(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)
        return None

    def checkpoint(self, name: str) -> Path:
        """Return the file of the ``best`` or the ``last`` checkpoint."""
        return self.checkpoints / f"{name}.ckpt"

    def is_free(self, *, claim: bool) -> bool:
        """Return whether no run has saved something here, and with ``claim`` keep other processes away.

        The claim is a lock on the folder, which ends with this process, so that a start that fails takes no name.
        """
        if self.checkpoints.is_dir() and any(self.checkpoints.iterdir()):
            return False
        if claim and sys.platform != "win32":
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                fcntl.flock(os.open(self.path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:  # a file system without locks
                pass
        return True
