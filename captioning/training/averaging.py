"""An average of the weights over training, which is evaluated in place of the last weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import WeightAveraging
from torch import Tensor

from captioning.errors import InputError
from captioning.training.module import CaptioningModule


class WeightAverage(WeightAveraging):
    """Keeps an exponential moving average of the weights, updated after every optimizer step.

    Validation and the sample captions use the average. A checkpoint's ``state_dict`` holds the average, so that
    ``captioner.load`` captions with it, and beside it the current weights, which a resumed run trains. After training,
    the module has the average.

    Differs from Lightning's ``EMAWeightAveraging`` in four points. Buffers are copied, not averaged: the statistics of
    standardised annotations belong to the data, and a count of batches has no average. The first steps weigh less, as
    described for ``decay``. A checkpoint that is saved while the average is in place, by Ctrl-C in a validation or
    after training, still tells the two apart. Weights that both have in common, of a frozen encoder, are saved once.

    Args:
        decay: Factor d of ``average = d * average + (1 - d) * weights``. At step n it is at most (1 + n) / (10 + n), so
            that the average of a short run is not dominated by its random beginning.

    Raises:
        InputError: The decay is not in [0, 1).
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise InputError(f"WeightAverage: decay must be at least 0 and below 1, got {decay}")
        self.decay = decay
        self._in_place = False  # whether the module currently has the average
        super().__init__(use_buffers=False, avg_fn=self._updated)

    def _updated(self, average: Tensor, weights: Tensor, updates: Tensor | int) -> Tensor:
        decay = min(self.decay, (1 + int(updates)) / (10 + int(updates)))
        return torch.lerp(average, weights, 1 - decay)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._in_place = False
        if stage == "fit":
            self._device = trainer.strategy.root_device  # Lightning moves the model there later
        # The copy needs no recipes of optimizers, which hold a reference to the command line's parser.
        recipes: dict[str, Any] = {
            name: vars(pl_module)[name] for name in ("optimizer", "scheduler") if name in vars(pl_module)
        }
        vars(pl_module).update(dict.fromkeys(recipes))
        with warnings.catch_warnings():  # about sharded strategies, which are not used
            warnings.filterwarnings("ignore", message="You're using the WeightAveraging callback with a model that")
            super().setup(trainer, pl_module, stage)
        vars(pl_module).update(recipes)
        if stage == "fit":
            assert isinstance(pl_module, CaptioningModule)
            pl_module.evaluated_weights = lambda: self._evaluating(pl_module)

    @contextmanager
    def _evaluating(self, module: pl.LightningModule) -> Iterator[None]:
        """Put the average in place for the duration of the context, unless it already is."""
        before = self._in_place
        if not before:
            self._swap_models(module)
        yield
        if not before:
            self._swap_models(module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._in_place:
            self._swap_models(pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._average_model is None:
            return
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        average, current = checkpoint["state_dict"], checkpoint["current_model_state"]
        if self._in_place:
            average, current = current, average
        different = {name: value for name, value in current.items() if not torch.equal(value, average[name])}
        checkpoint |= {"state_dict": average, "current_model_state": different}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._average_model is None:  # an evaluation, which needs only the checkpoint's state_dict
            return
        if "current_model_state" in checkpoint:
            current = checkpoint["state_dict"] | checkpoint["current_model_state"]
            checkpoint = checkpoint | {"current_model_state": current}
        super().on_load_checkpoint(trainer, pl_module, checkpoint)

    def _swap_models(self, pl_module: pl.LightningModule) -> None:
        super()._swap_models(pl_module)
        self._in_place = not self._in_place
