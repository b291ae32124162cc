"""What a run tells of itself: a progress bar, lines, speed, and the sizes of its model and its data."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, ModelSummary, RichModelSummary, RichProgressBar
from torch import Tensor, nn

from captioning.data.batch import CaptionBatch
from captioning.data.records import CaptionIndex
from captioning.errors import check_range
from captioning.model.captioner import Captioner
from captioning.progress import Progress
from captioning.training.module import CaptioningModule
from captioning.training.wandb_run import WandbRun


class EpochBar(RichProgressBar):
    """Lightning's bar, which counts epochs from 1, as the lines of the log do, and leaves out the logger's version."""

    def _get_train_description(self, current_epoch: int) -> str:
        description = _epoch(current_epoch, self.trainer.max_epochs)
        return f"{description:{len(self.validation_description)}}"  # bars of one width do not flicker

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics


def _epoch(current: int, last: int | None) -> str:
    return f"epoch {current + 1}" + (f"/{last}" if last is not None and last > 0 else "")


class PartSizes(Callback):
    """Prints a line before training: the parameters of encoder, attention and the rest of the decoder."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        sizes = part_sizes(_captioner(pl_module))
        trained = sizes.pop("trained")
        parts = ", ".join(f"{name} {count:,}" for name, count in sizes.items())
        print(f"parameters: {parts}; {trained:,} of {sum(sizes.values()):,} are trained", flush=True)


def part_sizes(captioner: Captioner) -> dict[str, int]:
    """Return the parameters of "encoder", "attention" and the rest of "decoder", and how many of all are "trained"."""
    encoder, decoder = captioner.encoder, captioner.decoder
    attention = sum(_count(module) for module in decoder.attentions())
    sizes = {"encoder": _count(encoder), "attention": attention, "decoder": _count(decoder) - attention}
    return sizes | {"trained": _count(encoder, trained=True) + _count(decoder, trained=True)}


def _count(module: nn.Module, *, trained: bool = False) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


def _captioner(module: pl.LightningModule) -> Captioner:
    assert isinstance(module, CaptioningModule) and module.captioner is not None
    return module.captioner


_DISPLAYS: dict[type, type[Callback]] = {
    RichProgressBar: EpochBar,
    ModelSummary: PartSizes,
    RichModelSummary: PartSizes,
}


def with_own_displays(callbacks: list[Callback]) -> list[Callback]:
    """Return the callbacks with Lightning's displays replaced by those of this module."""
    return [_DISPLAYS[type(callback)]() if type(callback) in _DISPLAYS else callback for callback in callbacks]


class LogLines(Callback):
    """Prints a line after every validation, which stays on the terminal when the bar of the epoch is gone.

    A log has no bar: there, a line says now and then how far training or the test is, and how long it will take.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started = time.perf_counter()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        steps = trainer.estimated_stepping_batches
        self._progress = self._begin(
            trainer, int(steps) if math.isfinite(steps) else None, trainer.global_step, "steps"
        )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: CaptionBatch, batch_idx: int
    ) -> None:
        self._progress.label = _epoch(trainer.current_epoch, trainer.max_epochs)
        self._progress.update(trainer.global_step)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, CaptioningModule)
        self._progress = self._begin(trainer, len(pl_module.data.evaluated), 0, "images")
        self._progress.label = "test"

    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: CaptionBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._progress.update(self._progress.done + len(batch.rows) * trainer.world_size)

    def _begin(self, trainer: pl.Trainer, total: int | None, done: int, unit: str) -> Progress:
        return Progress("", total, done, unit=unit, shown=trainer.is_global_zero and not sys.stdout.isatty())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        scores = [
            f"{name} {float(trainer.callback_metrics[name]):.2f}"
            for name in ("train/loss", "val/nll", "val/bleu4", "val/pointing_accuracy")
            if name in trainer.callback_metrics
        ]
        seconds = time.perf_counter() - self._started
        print(f"epoch {trainer.current_epoch + 1}, step {trainer.global_step}, {seconds:.0f} s:", *scores, flush=True)


class Throughput(Callback):
    """Logs ``train/captions_per_second`` and ``train/words_per_second`` of this process; every run of ``fit`` has one.

    A word is a step of the decoder, so the end of a caption counts as one. An epoch with fewer batches than
    ``every_n_steps`` is one figure.

    Args:
        every_n_steps: Batches per logged figure.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        check_range(1, every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._begin()
        self._logged = False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin()
        self._logged = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: CaptionBatch, batch_idx: int
    ) -> None:
        self._captions += len(batch.captions)
        self._words += batch.lengths.sum()  # stays on the device, which need not be waited for
        if (batch_idx + 1) % self.every_n_steps == 0:
            self._log(pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._captions and not self._logged:
            self._log(pl_module)

    def _begin(self) -> None:
        self._captions, self._since = 0, time.perf_counter()
        self._words: Tensor | int = 0

    def _log(self, pl_module: pl.LightningModule) -> None:
        words = int(self._words)  # waits for the device, so that the time is that of the steps
        seconds = time.perf_counter() - self._since
        pl_module.log("train/captions_per_second", self._captions / seconds)
        pl_module.log("train/words_per_second", words / seconds)
        self._begin()
        self._logged = True


class LogFacts(Callback):
    """Logs the sizes of the model's parts and of the splits when training starts.

    They become part of the configuration that a logger keeps, as ``parameters`` and ``splits``. A wandb run with
    ``log_model`` also gets the data as an artifact, so that its checkpoints are linked to them.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        assert isinstance(pl_module, CaptioningModule)
        splits = {split: split_facts(pl_module.data.index(split)) for split in ("train", "val")}
        for logger in trainer.loggers:
            logger.log_hyperparams({"parameters": part_sizes(_captioner(pl_module)), "splits": splits})
            if isinstance(logger, WandbRun):
                logger.log_data(type(pl_module.data.source).__name__, splits)


def split_facts(index: CaptionIndex) -> dict[str, Any]:
    """Return the numbers of "images" and "captions" of a split, and their "sha256".

    The hash covers the ids and file names of the images and the words of the captions, but no pixels.
    """
    digest = hashlib.sha256()
    digest.update(repr((index.image_ids.tolist(), index.first_caption.tolist(), index.paths, index.captions)).encode())
    return {"images": len(index.image_ids), "captions": len(index.captions), "sha256": digest.hexdigest()}
