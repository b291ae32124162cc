"""Callbacks: the best checkpoint, sample captions, tests in wandb, unfreezing, throughput, log lines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor

from captioning.data.batch import CaptionBatch
from captioning.errors import check_range
from captioning.files import replacing
from captioning.training.evaluation_loops import Sample
from captioning.training.module import CaptioningModule
from captioning.training.wandb_run import WandbRun


class BestCheckpoint(ModelCheckpoint):
    """Keeps the best checkpoint by the monitored score, and of equally good ones that of the lowest ``val/nll``.

    BLEU-4 of few or early captions is 0 at one validation after the other; Lightning would keep the first of them.
    """

    _nll = float("inf")  # of the checkpoint that is kept

    @property
    def state_key(self) -> str:
        """Of the class that earlier versions used, so that their runs resume, too."""
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if _is_validated(trainer):  # else there is nothing to choose by
            super().on_train_epoch_end(trainer, pl_module)

    def check_monitor_top_k(self, trainer: pl.Trainer, current: Tensor | None = None) -> bool:
        nll = float(trainer.callback_metrics.get("val/nll", float("inf")))
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
        self._nll = state_dict.get("nll", self._nll)


class StopEarly(EarlyStopping):
    """Lightning's ``EarlyStopping``, which says nothing before the first validation, as in a run of a few steps."""

    @property
    def state_key(self) -> str:
        """Of the class that earlier versions used, so that their runs resume, too."""
        return super().state_key.replace(type(self).__qualname__, EarlyStopping.__qualname__, 1)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if _is_validated(trainer):
            super().on_train_epoch_end(trainer, pl_module)


def _is_validated(trainer: pl.Trainer) -> bool:
    return any(name.startswith("val/") for name in trainer.callback_metrics)


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
    """Logs a test to the wandb run that the training of its checkpoint was logged to.

    Scores, a table with every image, and attention overlays of the first ones, which are also written to ``samples/``.

    Args:
        run: of the folder that the checkpoint lies in.
        images: how many overlays.
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
    """Write the attention overlay of every sample to a file of its name in ``samples/``, and return the files."""
    from captioning.views.overlays import attention_figure  # matplotlib is slow to import

    preprocessing = module.encoder.preprocessing
    folder, paths = Path(module.trainer.default_root_dir) / "samples", []
    for sample, name in zip(samples, names, strict=True):
        figure = attention_figure(
            preprocessing.view(sample.photo),
            sample.image.words,
            sample.found.trace,
            module.encoder.cells,
            photo=sample.photo,
            region=preprocessing.region(sample.photo.size),
            text=sample.image.text,
        )
        with replacing(folder / name) as part:
            figure.savefig(part, dpi=80, format="png", pil_kwargs={"compress_level": 1})  # in half the time
        paths.append(folder / name)
    return paths


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
    """Logs ``train/captions_per_second`` and ``train/words_per_second`` of this process; every run of ``fit`` has one.

    A word is a step of the decoder, so that the end of a caption counts as one. An epoch of fewer batches than
    ``every_n_steps`` is one figure.

    Args:
        every_n_steps: batches per logged figure.
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
        self._words += batch.lengths.sum()  # on the device, which is not waited for
        if (batch_idx + 1) % self.every_n_steps == 0:
            self._log(pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._captions and not self._logged:
            self._log(pl_module)

    def _begin(self) -> None:
        self._captions, self._since = 0, time.perf_counter()
        self._words: Tensor | int = 0

    def _log(self, pl_module: pl.LightningModule) -> None:
        words = int(self._words)  # waits for the device: the time is that of the steps
        seconds = time.perf_counter() - self._since
        pl_module.log("train/captions_per_second", self._captions / seconds)
        pl_module.log("train/words_per_second", words / seconds)
        self._begin()
        self._logged = True


class Unfreeze(Callback):
    """Keeps an encoder that is to be fine-tuned frozen for the first epochs, while the decoder is still random.

    One that is frozen for good, without ``trainable_from``, stays frozen.

    Args:
        epoch: how many epochs it stays frozen.

    Raises:
        InputError: a negative number of epochs.
    """

    def __init__(self, epoch: int) -> None:
        check_range(0, epoch=epoch)
        self.epoch = epoch

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_train_epoch_start(trainer, pl_module)  # which a run that resumes inside an epoch does without

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, CaptioningModule)
        encoder = pl_module.encoder
        encoder.set_trainable(encoder.trainable_from is not None and trainer.current_epoch >= self.epoch)
