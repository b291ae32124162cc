"""The layout of a run's folder."""

from __future__ import annotations

from pathlib import Path


class RunFolder:
    """RUNS/NAME, which holds everything of one training run; any of it may be missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"  # in full
        self.checkpoints = path / "checkpoints"
        self.wandb_run = path / "wandb_run.json"  # which run of wandb it is

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

    def checkpoint(self, name: str) -> Path:
        """Return the file of the ``best`` or the ``last`` checkpoint."""
        return self.checkpoints / f"{name}.ckpt"
