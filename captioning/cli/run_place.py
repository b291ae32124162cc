"""Where a run reads and writes: its folder, its checkpoint, and the claim that reserves the folder for one process."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from captioning.cli.command_line import config_name, refuse_missing
from captioning.errors import InputError
from captioning.files import errors_named
from captioning.run_folder import Claim, RunFolder
from captioning.training.processes import process_rank

_FOLDER = "CAPTIONING_RUN_FOLDER"
"""Environment variable by which the first process of a run tells the others where it writes."""


class RunPlace(NamedTuple):
    """The folder of a run, and the checkpoint that is resumed or evaluated."""

    folder: Path
    checkpoint: str | None

    @classmethod
    def of(cls, config: Any, *, fitting: bool) -> RunPlace:
        """Return where the run of a parsed configuration lies.

        Raises:
            InputError: Its checkpoint is missing, or belongs to another run than the one in the folder; or the folder
                that an evaluation writes to has links in it.
        """
        folder = Path(config.runs) / (config.name or config_name(config.get("config")) or "run")
        if "\0" in str(folder):
            raise InputError(f"--name {str(folder)!r}: control characters are not allowed")
        if config.name in (".", ".."):
            raise InputError(f"--name {config.name}: is not a valid name of a folder")
        checkpoint = config.get("ckpt_path")
        if checkpoint in ("best", "last") or not (fitting or checkpoint):
            file = RunFolder(folder).checkpoint(checkpoint or "best")
            checkpoint = str(file)
        if checkpoint:
            refuse_missing(checkpoint)
            owner = RunFolder.of(checkpoint)
            if owner is not None and (config.name is None or not fitting):
                folder = owner.path
            elif fitting and not _same(owner, folder) and RunFolder(folder).is_trained():
                raise InputError(f"{folder}: holds another run than {checkpoint} is of; give another --name")
            elif not (fitting or config.name or config.results) and RunFolder(folder).is_trained():
                raise InputError(f"{folder}: belongs to another run than {checkpoint}; give --results")
        elif process_rank() and _FOLDER in os.environ:
            folder = Path(os.environ[_FOLDER])
        if not fitting:  # a run that trains claims its folder
            RunFolder(folder).refuse_links()
        return cls(folder, checkpoint)

    def claimed(self) -> tuple[RunPlace, Claim]:
        """Return the place, claimed by this process. A new run takes the first free folder of NAME, NAME-2 ..

        Raises:
            InputError: Another process has claimed the folder of the resumed run, or no folder can be made.
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


@contextlib.contextmanager
def removes_what_a_failed_start_wrote(folder: Path, begun: Callable[[], bool]) -> Iterator[None]:
    """Remove what a run that failed before its first step wrote into its folder, and the folder if it is empty then.

    Args:
        begun: Called after an error. True keeps everything.
    """
    before = set(_entries(folder))
    try:
        yield
    except BaseException:
        if not begun():
            for entry in _entries(folder):
                if entry not in before:
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            with contextlib.suppress(OSError):  # it holds a file of the user's, or does not exist
                folder.rmdir()
        raise


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
