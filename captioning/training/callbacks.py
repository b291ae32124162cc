"""Callbacks: best checkpoint, early stopping, sample captions, tests in wandb, unfreezing."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor

from captioning.errors import InputError, check_range, one_line
from captioning.evaluation.metrics import METRICS
from captioning.files import replacing
from captioning.training.evaluation_loops import Sample
from captioning.training.module import CaptioningModule
from captioning.training.wandb_run import WandbRun

_WIDE = re.compile(r":[^{}]*\d{3}")  # a number of a million characters takes that memory


class NamedCheckpoint(ModelCheckpoint):
    """Lightning's ``ModelCheckpoint``, whose template of file names leads to no other folder.

    A run that stopped inside an epoch resumes there. After an error in a validation, all of it is repeated.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.format_checkpoint_name({})  # refuses a template before training, not after the first epoch

    def format_checkpoint_name(
        self, metrics: dict[str, Tensor], filename: str | None = None, ver: int | None = None, prefix: str | None = None
    ) -> str:
        """Return the path of a checkpoint.

        Raises:
            InputError: The template cannot be filled, or leads out of the folder with these numbers.
        """
        template = filename or self.filename or ""
        if _WIDE.search(template):
            raise InputError(f"filename {template!r}: numbers are at most 99 characters wide")
        try:
            path = super().format_checkpoint_name(metrics, filename, ver, prefix)
            inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.dirpath or "."))
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise InputError(f"filename {template!r}: is no name of a file ({one_line(error)})") from error
        if not inside:
            raise InputError(f"filename {template!r}: {path} would lie outside {self.dirpath}")
        return path

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            return
        # Stopped inside an epoch, as by max_steps: Lightning counts the epoch as one that has ended.
        for progress in ("total", "current"):
            epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"][progress]
            if epochs["processed"] == epochs["started"] > 0:
                epochs["processed"] -= 1

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.validating:  # the scores of the images before are lost: the resumed run validates all of them
            batches = trainer.fit_loop.epoch_loop.val_loop.batch_progress
            for progress in (batches.total, batches.current):
                vars(progress).update(ready=1, started=1, processed=0, completed=0)
        super().on_exception(trainer, pl_module, exception)


class BestCheckpoint(NamedCheckpoint):
    """Keeps the checkpoint with the best monitored score and, among equal scores, the lowest ``val/nll``.

    BLEU-4 of few or early captions is 0 in several validations in a row; Lightning would keep the first of them.
    """

    _nll = float("inf")  # of the checkpoint that is kept

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if _is_validated(trainer):  # otherwise there is no score to choose by
            super().on_train_epoch_end(trainer, pl_module)

    def check_monitor_top_k(self, trainer: pl.Trainer, current: Tensor | None = None) -> bool:
        nll = _validated_nll(trainer)
        better = super().check_monitor_top_k(trainer, current)
        if not better and current is not None and self.save_top_k == 1:
            better = bool(current == self.best_model_score) and nll < self._nll  # both are the same on all processes
        if better:
            self._nll = nll
        return better

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"nll": self._nll}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._nll = state_dict["nll"]


class StopEarly(EarlyStopping):
    """Stops when the monitored score has not improved for ``patience`` validations; a lower ``val/nll`` among equal
    scores is an improvement, too, so that a run does not end while BLEU-4 is still 0.

    It is silent before the first validation, which a run of a few steps never reaches.
    """

    _nll = float("inf")  # of the best validation

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if _is_validated(trainer):
            super().on_train_epoch_end(trainer, pl_module)

    def _run_early_stopping_check(self, trainer: pl.Trainer) -> None:
        score, nll = trainer.callback_metrics.get(self.monitor), _validated_nll(trainer)
        if score is not None and bool(score == self.best_score) and nll < self._nll:
            self.wait_count = -1  # the check of an equal score adds one
        super()._run_early_stopping_check(trainer)
        if self.wait_count == 0:
            self._nll = nll

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"nll": self._nll}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        try:
            super().load_state_dict(state_dict)
        except ValueError as error:  # Lightning's number of a reason
            raise InputError(f"callbacks.EarlyStopping: {one_line(error)}; the checkpoint was edited") from error
        self._nll = state_dict["nll"]


def _validated_nll(trainer: pl.Trainer) -> float:
    return float(trainer.callback_metrics.get("val/nll", float("inf")))


def _is_validated(trainer: pl.Trainer) -> bool:
    return any(name.startswith("val/") for name in trainer.callback_metrics)


def refuse_unknown_monitors(trainer: pl.Trainer) -> None:
    """Refuse to monitor a score that no validation logs, or to keep its worst value.

    Lightning would notice the first after an epoch, and the second never.

    Raises:
        InputError: Names the option.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if any(
        type(callback).__module__.split(".")[0] not in ("captioning", "pytorch_lightning") for callback in callbacks
    ):
        return  # a callback of the user's may log more
    logged = [f"val/{name}" for name in sorted(METRICS)]
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        option = "early_stopping" if isinstance(callback, EarlyStopping) else "checkpoint"
        if monitor is not None and monitor not in logged and not monitor.startswith("train/"):
            near = difflib.get_close_matches(monitor, logged, 3, 0.3)
            raise InputError(f"--{option}.monitor {monitor}: no validation logs that; near: {', '.join(near)}")
        if monitor in ("val/nll", "train/loss") and getattr(callback, "mode", None) == "max":
            raise InputError(f"--{option}.monitor {monitor}: the lowest is best; add --{option}.mode min")


class CaptionSamples(Callback):
    """Captions and attention overlays of the first images of the validation split, after every validation.

    They are written to ``samples/`` in the run's folder and logged to wandb if that is a logger of the run.

    Args:
        images: Number of images.
    """

    def __init__(self, images: int = 4) -> None:
        check_range(0, images=images)
        self.images = images

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        fitting = trainer.state.fn == "fit" and not trainer.sanity_checking
        if not fitting or not trainer.is_global_zero or not self.images:
            return
        assert isinstance(pl_module, CaptioningModule)
        samples = pl_module.caption_samples(self.images)
        names = [f"{sample.image.image_id}_{trainer.current_epoch + 1:03d}.png" for sample in samples]
        paths = _save_figures(pl_module, samples, names)
        for logger in trainer.loggers:
            if isinstance(logger, WandbRun):
                images = [sample.image for sample in samples]
                logger.log_samples(images, paths, epoch=trainer.current_epoch + 1, step=trainer.global_step)


class LogTest(Callback):
    """Logs a test to the wandb run of the training that wrote the checkpoint.

    It logs the scores, a table with every image, and attention overlays of the first images, which are also written to
    ``samples/``.

    Args:
        run: Run of the folder that the checkpoint lies in.
        images: Number of overlays.
    """

    def __init__(self, run: WandbRun, images: int = 4) -> None:
        self.run = run
        self.images = images

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, CaptioningModule)
        pl_module.keep_hypotheses = self.images

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, CaptioningModule)
        if not trainer.is_global_zero or not pl_module.results:
            return
        samples = pl_module.kept_samples()
        names = [f"{sample.image.image_id}_test.png" for sample in samples]
        paths = _save_figures(pl_module, samples, names)
        scores = {name: float(value) for name, value in trainer.callback_metrics.items()}
        conditions = {"split": pl_module.data.test_split} | vars(pl_module.search)
        conditions |= {"inference": pl_module.attention.inference, "tokens": pl_module.data.source.tokens}
        self.run.log_test(
            scores,
            pl_module.results,
            [(sample.image.text, path) for sample, path in zip(samples, paths, strict=True)],
            conditions={f"test/{name}": value for name, value in conditions.items()},
            step=pl_module.loaded_step,
        )
        self.run.finish()


def _save_figures(module: CaptioningModule, samples: list[Sample], names: list[str]) -> list[Path]:
    """Write the attention overlay of every sample to the file of its name in ``samples/``; returns the files."""
    from captioning.views.overlays import attention_figure  # matplotlib is slow to import

    preprocessing = module.encoder.preprocessing
    folder, paths = Path(module.trainer.default_root_dir) / "samples", []
    for sample, name in zip(samples, names, strict=True):
        figure = attention_figure(
            preprocessing.view(sample.photo),
            sample.image.words,
            sample.hypothesis.trace,
            module.encoder.cells,
            photo=sample.photo,
            region=preprocessing.region(sample.photo.size),
            text=sample.image.text,
        )
        with replacing(folder / name, follow=False) as part:
            figure.savefig(part, dpi=80, format="png", pil_kwargs={"compress_level": 1})  # in half the time
        paths.append(folder / name)
    return paths


class Unfreeze(Callback):
    """Keeps a trainable encoder frozen for the first epochs, while the decoder is still random.

    An encoder without ``trainable_from`` stays frozen for good.

    Args:
        epoch: Number of epochs for which it is frozen.

    Raises:
        InputError: The number is negative.
    """

    def __init__(self, epoch: int) -> None:
        check_range(0, epoch=epoch)
        self.epoch = epoch

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_train_epoch_start(trainer, pl_module)  # a run that resumes inside an epoch does not call it

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, CaptioningModule)
        encoder = pl_module.encoder
        encoder.set_trainable(encoder.trainable_from is not None and trainer.current_epoch >= self.epoch)
