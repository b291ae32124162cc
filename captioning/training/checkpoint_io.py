"""Checkpoints are written such that a crash, a full disk or a bad one leaves the old file."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO

from captioning.checkpoint.format import read_back, read_checkpoint
from captioning.errors import InputError
from captioning.files import replacing


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes under a temporary name, reads that back, and gives it its name only then; reads what has its checksums.

    A checkpoint remembers which files beside it were the best, to delete or upload them later. On loading they are
    looked for beside it, where its folder may have moved or been copied to; what it says of files in other folders is
    forgotten, because it may come from elsewhere.
    """

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Return all that training goes on from, on the CPU.

        Raises:
            InputError: ``captioning.checkpoint.format.read_checkpoint`` refuses it.
        """
        checkpoint = read_checkpoint(Path(path), training=True, weights_only=weights_only is not False)
        folder = os.path.realpath(os.path.dirname(path))
        callbacks = checkpoint.get("callbacks")
        for state in callbacks.values() if isinstance(callbacks, dict) else ():
            if isinstance(state, dict) and "best_model_path" in state:
                before = state.get("dirpath")
                for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
                    state[name] = _beside(folder, state.get(name), before)
                best = {_beside(folder, file, before): score for file, score in state.get("best_k_models", {}).items()}
                state["best_k_models"] = {file: score for file, score in best.items() if file}
                if any(best):
                    state["dirpath"] = folder
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint.

        Lightning would write it to the system's temporary folder first, which may be small, and is where a run that is
        killed leaves it.

        Raises:
            InputError: the disk is full, the folder cannot be written to, or what is read back differs; the file of
                that name is what it was before.
        """
        kept = "; the one before is kept" if Path(path).is_file() else ""
        try:
            with replacing(Path(path)) as part:
                content = io.BytesIO()
                torch.save(checkpoint, content)
                part.write_bytes(content.getbuffer())
                try:
                    read_back(part)
                except InputError as error:
                    raise InputError(f"{path}: {error}") from error
        except InputError as error:
            raise InputError(f"{error}{kept}") from error


def _beside(folder: str, file: Any, before: Any) -> str:
    """Return where a file is that a checkpoint of ``folder`` names: there, also if the folder was ``before``, or ""."""
    if _lies_in(folder, file):
        return str(file)
    moved = os.path.join(folder, os.path.basename(file)) if isinstance(file, str) else ""
    return moved if moved and os.path.dirname(file) == before and os.path.isfile(moved) else ""


def _lies_in(folder: str, file: Any) -> bool:
    return isinstance(file, str) and os.path.dirname(os.path.realpath(file)) == folder
