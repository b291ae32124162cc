"""What every run's logs say of its model and its data: sizes, and a hash that tells whether data are the same."""

from __future__ import annotations

import hashlib
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from captioning.data.records import CaptionIndex
from captioning.training.module import CaptioningModule
from captioning.training.progress import part_sizes
from captioning.training.wandb_run import WandbRun


class LogFacts(Callback):
    """Logs the parameters of the model's parts and the sizes of the splits, when training starts.

    They are in the configuration that a logger keeps, under ``parameters`` and ``splits``. A wandb run with
    ``log_model`` also has the data as an artifact: its checkpoints are then made by a run that used these data.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, CaptioningModule) and pl_module.captioner is not None
        if not trainer.is_global_zero:
            return
        splits = {split: split_facts(pl_module.data.index(split)) for split in ("train", "val")}
        for logger in trainer.loggers:
            logger.log_hyperparams({"parameters": part_sizes(pl_module.captioner), "splits": splits})
            if isinstance(logger, WandbRun):
                logger.log_data(type(pl_module.data.source).__name__, splits)


def split_facts(index: CaptionIndex) -> dict[str, Any]:
    """Return the numbers of "images" and "captions" of a split and the "sha256" of what they are.

    The hash is of the images' ids and files' names and of the captions' words, not of pixels.
    """
    found = hashlib.sha256()
    texts = (index.paths, index.captions)
    tensors = [index.image_ids, index.first_caption, *(part for text in texts for part in (text.offsets, text.blob))]
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        found.update(tensor.contiguous().numpy().view("uint8").data)
    return {"images": len(index.image_ids), "captions": len(index.captions), "sha256": found.hexdigest()}
