"""Where things lie in a run's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFolder:
    """RUNS/NAME, which holds everything of one training run.

    Attributes:
        path: may be missing, as everything in it may.
    """

    path: Path

    @classmethod
    def of(cls, checkpoint: str | Path) -> RunFolder | None:
        """Return RUNS/NAME of RUNS/NAME/checkpoints/x.ckpt, None for a file that lies elsewhere.

        The path is relative where the folder is below the current one.
        """
        folder = Path(checkpoint).resolve().parent
        if folder.name != "checkpoints":
            return None
        below = folder.parent.is_relative_to(Path.cwd())
        return cls(folder.parent.relative_to(Path.cwd()) if below else folder.parent)

    @property
    def config(self) -> Path:
        """The full configuration."""
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, name: str) -> Path:
        """Return the file of the ``best`` or the ``last`` checkpoint."""
        return self.checkpoints / f"{name}.ckpt"

    @property
    def wandb_run(self) -> Path:
        """Which run of wandb it is, as JSON."""
        return self.path / "wandb_run.json"
