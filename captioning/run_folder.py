"""The layout of a run's folder."""

from __future__ import annotations

import os
from pathlib import Path


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

    def is_trained(self) -> bool:
        """Return whether a run has saved something here."""
        return self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
