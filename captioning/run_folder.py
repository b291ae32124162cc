"""The layout of a run's folder, and checksums of its weights."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from pathlib import Path

from captioning.errors import InputError

CHECKPOINT_NAMES = ("best", "last")
"""Values of --ckpt_path that stand for a checkpoint of the run --name."""


class RunFolder:
    """RUNS/NAME, the folder of a training run. Any of its files may be missing."""

    made_by_claim = False  # whether ``claim`` has made the folder on disk

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"  # the full configuration
        self.checkpoints = path / "checkpoints"

    @classmethod
    def of_checkpoint(cls, checkpoint: str | Path, named_folder: Path | None = None) -> RunFolder | None:
        """Return RUNS/NAME for RUNS/NAME/checkpoints/x.ckpt or a link to it, None for a file elsewhere.

        The path is relative if the folder lies below the current one. With ``named_folder``, the folder of --name, best
        and last mean its checkpoints. Raises InputError if it has no such checkpoint.
        """
        if named_folder is not None and checkpoint in CHECKPOINT_NAMES:
            if not (run := cls(named_folder)).checkpoint(str(checkpoint)).is_file():
                missing = f"{named_folder} has no checkpoints/{checkpoint}.ckpt"
                raise InputError(f"--ckpt_path {checkpoint}: {missing}; name the run by --name (and --runs)")
            return run
        for file in (Path(os.path.abspath(checkpoint)), Path(checkpoint).resolve()):
            if file.parent.name == "checkpoints" and file.suffix == ".ckpt":
                folder = file.parent.parent
                return cls(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)
        return None

    def checkpoint(self, name: str) -> Path:
        """Return the file of the ``best`` or the ``last`` checkpoint; another name is a path."""
        return self.checkpoints / f"{name}.ckpt" if name in CHECKPOINT_NAMES else Path(name)

    def is_trained(self) -> bool:
        return any(self.checkpoints.glob("*.ckpt"))

    def is_taken(self) -> bool:
        """Return whether a run, perhaps without a checkpoint yet, or another file has the path."""
        is_file = os.path.lexists(self.path) and not self.path.is_dir()
        return is_file or os.path.lexists(self.config) or self.is_trained()

    def claim(self) -> bool:
        """Take the free folder for a new run; return False if another run was faster."""
        self.made_by_claim = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.config.open("x").close()
        except FileExistsError:
            return False
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error.strerror})") from error
        return True

    def release(self) -> None:
        """Undo ``claim`` unless the run has saved a checkpoint."""
        if not self.is_trained():
            self.config.unlink(missing_ok=True)
            if self.made_by_claim:  # any other file is a logger's
                shutil.rmtree(self.path, ignore_errors=True)


def checksum(checkpoint: str | Path) -> str:
    """Return a hash of the checksums in a checkpoint's zip file; "" if there is no such file."""
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            return hashlib.sha256(repr([entry.CRC for entry in archive.infolist()]).encode()).hexdigest()[:16]
    except (OSError, zipfile.BadZipFile):
        return ""


def is_current(checksum_of_weights: str, checkpoint: Path | None) -> bool:
    """Return whether a checkpoint has this ``checksum``; True if the checksum or the file is unknown."""
    return not checksum_of_weights or checkpoint is None or checksum_of_weights == checksum(checkpoint)
