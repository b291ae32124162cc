"""Callbacks: sample captions, unfreezing, throughput, log lines."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from captioning.data.batch import CaptionBatch
from captioning.errors import check_range
from captioning.files import replacing
from captioning.training.module import CaptioningModule
from captioning.training.wandb_run import WandbRun


class CaptionSamples(Callback):
    """Captions and attention overlays of the first images of the validation split, after every validation.

    They are written to ``samples/`` in the run's folder, and logged to wandb if that is the logger.

    Args:
        images: how many.
    """

    def __init__(self, images: int = 4) -> None:
        check_range(0, images=images)
        self.images = images

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero or not self.images:
            return
        from captioning.views.overlays import attention_figure  # matplotlib is slow to import

        assert isinstance(pl_module, CaptioningModule)
        samples = pl_module.caption_samples(self.images)
        folder = Path(trainer.default_root_dir) / "samples"
        paths = []
        for sample in samples:
            words, trace = sample.image.words, sample.found.trace
            figure = attention_figure(sample.view, words, trace, pl_module.encoder.cells)
            path = folder / f"{sample.image.image_id}_{trainer.current_epoch:03d}.png"
            with replacing(path) as part:
                figure.savefig(part, dpi=80, format="png")
            paths.append(path)
        for logger in trainer.loggers:
            if isinstance(logger, WandbRun):
                images = [sample.image for sample in samples]
                logger.log_samples(images, paths, epoch=trainer.current_epoch, step=trainer.global_step)


class LogLines(Callback):
    """One line per validation where the output is no terminal and a progress bar would show nothing until its end."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero or sys.stdout.isatty():
            return
        shown = [
            f"{name} {float(trainer.callback_metrics[name]):.2f}"
            for name in ("train/loss", "val/nll", "val/bleu4", "val/pointing_accuracy")
            if name in trainer.callback_metrics
        ]
        seconds = time.perf_counter() - self._started
        print(f"epoch {trainer.current_epoch + 1}, step {trainer.global_step}, {seconds:.0f} s:", *shown, flush=True)


class Throughput(Callback):
    """Logs ``train/captions_per_second`` of this process.

    Args:
        every_n_steps: batches per logged figure.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        check_range(1, every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._captions, self._since = 0, time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: CaptionBatch, batch_idx: int
    ) -> None:
        self._captions += len(batch.captions)
        if (batch_idx + 1) % self.every_n_steps == 0:
            now = time.perf_counter()
            pl_module.log("train/captions_per_second", self._captions / (now - self._since))
            self._captions, self._since = 0, now


class Unfreeze(Callback):
    """Keeps an encoder that is to be fine-tuned frozen for the first epochs, while the decoder is still random.

    Args:
        epoch: the first epoch (from 0) in which the encoder is trained.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, CaptioningModule)
        pl_module.encoder.set_trainable(trainer.current_epoch >= self.epoch)
