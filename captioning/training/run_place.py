"""Where a run reads and writes: its folder, its checkpoint, and the claim that holds the folder for one process."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any, NamedTuple

from captioning.cli.checks import refuse_missing, sound_or_earlier
from captioning.cli.command_line import config_name
from captioning.errors import InputError
from captioning.files import errors_named
from captioning.run_folder import Claim, RunFolder
from captioning.training.preemption import process_rank

_FOLDER = "CAPTIONING_RUN_FOLDER"
"""Environment variable by which the first process of a run tells the others where it writes."""


class RunPlace(NamedTuple):
    """The folder of a run, and the checkpoint that it goes on from or that is evaluated."""

    folder: Path
    checkpoint: str | None

    @classmethod
    def of(cls, config: Any, *, fitting: bool) -> RunPlace:
        """Return where the run of a parsed configuration lies.

        Raises:
            InputError: its checkpoint is missing, or is of another run than the one in the folder.
        """
        folder = Path(config.runs) / (config.name or config_name(config.get("config")) or "run")
        checkpoint = config.get("ckpt_path")
        if checkpoint in ("best", "last") or not (fitting or checkpoint):
            file = RunFolder(folder).checkpoint(checkpoint or "best")
            checkpoint = str(sound_or_earlier(file) if fitting else file)
        if checkpoint:
            refuse_missing(checkpoint)
            found = RunFolder.of(checkpoint)
            if found is not None and (config.name is None or not fitting):
                folder = found.path
            elif fitting and not _same(found, folder) and RunFolder(folder).is_trained():
                raise InputError(f"{folder}: holds another run than {checkpoint} is of; give another --name")
        elif process_rank() and _FOLDER in os.environ:
            folder = Path(os.environ[_FOLDER])
        return cls(folder, checkpoint)

    def claimed(self) -> tuple[RunPlace, Claim]:
        """Return the place held for this process alone: of a new run the first folder that is free, NAME, NAME-2 ..

        Raises:
            InputError: the resumed run's is held by another process, or no folder can be made.
        """
        with errors_named(self.folder, "--name"):
            for number in itertools.count(1):
                name = self.folder.name if number == 1 else f"{self.folder.name}-{number}"
                folder = RunFolder(self.folder.with_name(name))
                if not self.checkpoint and folder.is_trained():
                    continue
                claim = folder.claim()
                if claim is not None and (self.checkpoint or not folder.is_trained()):
                    os.environ[_FOLDER] = str(folder.path)  # the processes that this one starts must not choose another
                    print(f"run folder: {folder.path}", flush=True)
                    return self._replace(folder=folder.path), claim
                if claim is not None:
                    claim.release()
                elif self.checkpoint:
                    raise InputError(
                        f"{self.folder}: another `captioning fit` is at work in this folder; wait for its end"
                    )
        raise AssertionError


def _same(folder: RunFolder | None, path: Path) -> bool:
    return folder is not None and folder.path.resolve() == path.resolve()
