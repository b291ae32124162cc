"""The layout of a run's folder, whether its results are of its weights, and its settings as lines."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from captioning.errors import InputError

PLACES = (
    "name runs results config ckpt_path trainer.default_root_dir trainer.logger checkpoint.dirpath last.dirpath"
).split()
"""Settings that say where a run is stored and logged."""


class RunFolder:
    """RUNS/NAME, the folder of a training run. Any of its files may be missing."""

    is_new = False  # whether a claim has made it

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

    def claim(self) -> bool:
        """Take the folder for a run that starts; returns False if it is another's, which may have no checkpoint yet."""
        self.is_new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not self.is_trained():
                self.config.open("x").close()
                return True
        except FileExistsError:
            pass
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error.strerror})") from error
        return False

    def release(self) -> None:
        """Let another run take the folder if this one, which has claimed it, has saved nothing."""
        if not self.is_trained():
            self.config.unlink(missing_ok=True)
            if self.is_new:  # with what loggers wrote
                shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # it has other files
                if not self.is_new:
                    self.path.rmdir()
                self.path.parent.rmdir()


def checksum(checkpoint: str | Path) -> str:
    """Return what tells a checkpoint's content from others', by the checksums of its tensors; "" without a file."""
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            return hashlib.sha256(repr([part.CRC for part in archive.infolist()]).encode()).hexdigest()[:16]
    except (OSError, zipfile.BadZipFile):
        return ""


def is_current(search: dict[str, Any], checkpoint: Path | None) -> bool:
    """Take the checksum of tested weights out of options; return whether a checkpoint, if known, has these weights."""
    weights = search.pop("weights", "")
    return not weights or checkpoint is None or weights == checksum(checkpoint)


def flat(settings: Mapping[str, Any], without: Iterable[str] = ()) -> dict[str, Any]:
    """Return settings as {"model.decoder.dropout": 0.5}, but those in or beneath ``without``.

    A class has its short name, unless it is the user's own. Components of a list are keyed by their class.
    """
    left_out = tuple(f"{name}." for name in without)
    return {key: value for key, value in _flat("", settings) if not f"{key}.".startswith(left_out)}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and "class_path" in value:
        path = str(value["class_path"])
        yield prefix, _short(path) if path.startswith(("captioning.", "torch.", "pytorch_lightning.")) else path
        arguments = value.get("init_args") or {}
        yield from _flat(prefix, arguments) if arguments else ()
    elif isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        for number, item in enumerate(value):
            yield from _flat(f"{prefix}.{_short(item.get('class_path', number))}", item)
    else:
        yield prefix, value


def _short(class_path: Any) -> str:
    return str(class_path).rpartition(".")[2]
