"""Lightning reads and writes checkpoints through ``captioning.checkpoint``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytorch_lightning.plugins.io import TorchCheckpointIO

from captioning.checkpoint.io import read_checkpoint, write_checkpoint


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes with ``write_checkpoint``, and reads the whole state of training with ``read_checkpoint``."""

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return read_checkpoint(Path(path))

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        write_checkpoint(checkpoint, Path(path))
