"""Callbacks: sample captions, unfreezing, throughput, log lines; and checkpoints that are written atomically."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins.io import TorchCheckpointIO

from captioning.data.batch import CaptionBatch
from captioning.errors import InputError
from captioning.files import replacing
from captioning.training.module import CaptioningModule
from captioning.training.wandb_run import WandbRun


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint such that a crash leaves the old file or the new one.

    A checkpoint remembers which files beside it were the best, to delete or upload them later; what it says of files
    in other folders is forgotten on loading, because it may come from elsewhere.
    """

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        try:
            checkpoint = super().load_checkpoint(path, *args, **options)
        except pickle.UnpicklingError as error:
            raise InputError(
                f"{path}: holds objects beside weights and plain data, and opening it could run code; "
                "if you made it yourself, give --weights_only false"
            ) from error
        folder = os.path.realpath(os.path.dirname(path))
        for state in checkpoint.get("callbacks", {}).values():
            if isinstance(state, dict) and "best_model_path" in state:
                for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
                    if not _lies_in(folder, state.get(name)):
                        state[name] = ""
                state["best_k_models"] = {
                    file: score for file, score in state.get("best_k_models", {}).items() if _lies_in(folder, file)
                }
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        with replacing(Path(path)) as part:
            super().save_checkpoint(checkpoint, part, storage_options)


def _lies_in(folder: str, file: Any) -> bool:
    return isinstance(file, str) and os.path.dirname(os.path.realpath(file)) == folder


class CaptionSamples(Callback):
    """Captions and attention overlays of the first images of the validation split, after every validation.

    They are written to ``samples/`` in the run's folder, and logged to wandb if that is the logger.

    Args:
        images: how many.
    """

    def __init__(self, images: int = 4) -> None:
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
            path = folder / f"{sample.image.image_id}_{trainer.current_epoch + 1:03d}.png"
            with replacing(path) as part:
                figure.savefig(part, dpi=80, format="png")
            paths.append(path)
        for logger in trainer.loggers:
            if isinstance(logger, WandbRun):
                images = [sample.image for sample in samples]
                logger.log_samples(images, paths, epoch=trainer.current_epoch + 1, step=trainer.global_step)


class LogLines(Callback):
    """One line per validation, which stays on a terminal, too, where a progress bar is gone with its epoch."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero:
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
        epoch: how many epochs it stays frozen.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, CaptioningModule)
        pl_module.encoder.set_trainable(trainer.current_epoch >= self.epoch)
