"""The layout of a run's folder, and the lock on it."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from types import TracebackType

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class RunFolder:
    """RUNS/NAME, the folder of a training run. Any of its files may be missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"  # the full configuration
        self.checkpoints = path / "checkpoints"
        self.wandb_run = path / "wandb_run.json"  # names the run of wandb

    @classmethod
    def of(cls, checkpoint: str | Path) -> RunFolder | None:
        """Return RUNS/NAME of RUNS/NAME/checkpoints/x.ckpt, None for a file elsewhere.

        The path is relative if the folder is below the current one.
        """
        folder = Path(checkpoint).resolve().parent
        if folder.name != "checkpoints":
            return None
        below = folder.parent.is_relative_to(Path.cwd())
        return cls(folder.parent.relative_to(Path.cwd()) if below else folder.parent)

    def checkpoint(self, name: str) -> Path:
        """Return the file of the ``best`` or the ``last`` checkpoint."""
        return self.checkpoints / f"{name}.ckpt"

    def is_trained(self) -> bool:
        """Return whether a run has saved something here."""
        return self.checkpoints.is_dir() and any(self.checkpoints.iterdir())

    def claim(self) -> Claim | None:
        """Make the folder and lock it against other processes; None if another process has locked it.

        The lock ends with the process, however that ends.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        claim = Claim(self.path)
        if claim.held:
            return claim
        claim.release()
        return None


def of_any_seed(checkpoint: str, seed: object) -> str:
    """Return RUNS/NAME/checkpoints/x.ckpt with a star for the seed at the end of NAME, where a study's runs have it."""
    return re.sub(rf"(?<!\d){re.escape(str(seed))}(?=/checkpoints/[^/]*$)", "*", checkpoint)


class Claim:
    """A lock on a folder, as a context manager. Releasing it removes the folder if that is empty."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / ".lock"
        self._file = self._path.open("a")
        self.held = self._lock()

    def _lock(self) -> bool:
        if fcntl is None:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:  # its last holder has just removed it
            return False

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        with contextlib.suppress(OSError):  # the folder may have been deleted
            if self.held:
                self._path.unlink()
                if not any(self._folder.iterdir()):
                    self._folder.rmdir()
        self._file.close()
