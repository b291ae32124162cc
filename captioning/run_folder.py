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

from captioning.errors import InputError

_FOLDERS = frozenset({"checkpoints", "metrics", "samples", "wandb"})
_FILE = re.compile(
    r"config\.yaml|wandb_run\.json|\.lock|predictions\.jsonl|\w+_results\.json|(test|validate|val)_(metrics|captions)\.json"
)


class RunFolder:
    """RUNS/NAME, the folder of a training run. Any of its files may be missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"  # the full configuration
        self.checkpoints = path / "checkpoints"
        self.wandb_run = path / "wandb_run.json"  # names the run of wandb

    @classmethod
    def of(cls, checkpoint: str | Path) -> RunFolder | None:
        """Return RUNS/NAME of RUNS/NAME/checkpoints/x.ckpt or of a link to it, None for a file elsewhere.

        The path is relative if the folder is below the current one. A link inside a run's folder is not followed: it
        would make another folder the run's.
        """
        named, target = Path(os.path.abspath(checkpoint)), Path(checkpoint).resolve()
        folder = next((file.parent.parent for file in (named, target) if file.parent.name == "checkpoints"), None)
        if folder is None:
            return None
        here = next((here for here in (Path(os.path.abspath(".")), Path.cwd()) if folder.is_relative_to(here)), None)
        return cls(folder if here is None else folder.relative_to(here))

    @classmethod
    def around(cls, file: Path) -> RunFolder | None:
        """Return the run that a file belongs to, None for a file of the user's, wherever it lies."""
        file = Path(os.path.realpath(file))
        for folder in file.parents:
            run = cls(folder)
            if run.config.is_file() and run.checkpoints.is_dir():
                first = file.relative_to(folder).parts[0]
                return run if first in _FOLDERS or _FILE.fullmatch(file.name) else None
        return None

    def checkpoint(self, name: str) -> Path:
        """Return the file of the ``best`` or the ``last`` checkpoint."""
        return self.checkpoints / f"{name}.ckpt"

    def is_trained(self) -> bool:
        """Return whether a run has saved something here."""
        return self.checkpoints.is_dir() and any(self.checkpoints.iterdir())

    def refuse_links(self) -> None:
        """Refuse a folder that was sent with links in it, because the run would write where they lead.

        The folder itself may be a link. Only wandb makes links inside, which stay inside but for the log of its core: a
        later run of wandb has a folder of its own, and writes to no log of an earlier one.

        Raises:
            InputError: Names the link, or what is neither file nor folder, such as a pipe.
        """
        root = Path(os.path.realpath(self.path))
        for folder, folders, files in os.walk(root):
            for path in (Path(folder, name) for name in (*folders, *files)):
                target = Path(os.path.realpath(path))
                of_wandb = root / "wandb" in path.parents
                if path.is_symlink() and not (
                    of_wandb and (target.is_relative_to(root) or path.name == "debug-core.log")
                ):
                    raise InputError(f"{path}: is a link to {target}, through which a run does not write; remove it")
                if path.exists() and not (path.is_file() or path.is_dir()):
                    raise InputError(f"{path}: is no regular file; remove it")

    def claim(self) -> Claim | None:
        """Make the folder and lock it against other processes; None if another process has locked it.

        The lock ends with the process, however that ends.

        Raises:
            InputError: The folder has links in it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.refuse_links()
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
        self._file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666), "a")
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
