"""Training that has diverged ends at that step, and no checkpoint is replaced by its weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from captioning.data.batch import CaptionBatch
from captioning.errors import InputError
from captioning.model.captioner import Captioner
from captioning.training.module import CaptioningModule

EVERY = 32
"""Steps between two checks on a GPU, because a check waits for the device."""

_REMEDY = "try a lower learning rate, --trainer.gradient_clip_val 5, or --trainer.precision 32-true"


class Diverged(InputError):
    """The loss, the gradient or the weights are not finite. Names the batch and its images."""


@dataclass
class _Step:
    """A step that has not been checked yet.

    Attributes:
        number: Number of the optimizer step, from 1.
        batch: Number of the batch in its epoch, from 1.
        image_ids: (B,) ids of the images.
        loss, gradient: () bool, whether they are finite. All tensors are on the device of the loss.
    """

    number: int
    batch: int
    image_ids: Tensor
    loss: Tensor
    gradient: Tensor

    def __str__(self) -> str:
        ids, shown = self.image_ids.tolist(), 8
        more = f" and {len(ids) - shown} more" if len(ids) > shown else ""
        return f"step {self.number} (batch {self.batch} of the epoch, images {', '.join(map(str, ids[:shown]))}{more})"


class StopOnDivergence(Callback):
    """Raises ``Diverged`` where a loss, a gradient or a weight is not finite, and keeps the checkpoints as they are.

    On a CPU, loss and gradient are checked in their step, before the gradient changes a weight. On a GPU that would
    wait for the device in every step, so ``EVERY`` steps are checked together; the message still names the first bad
    one. Weights are checked before each validation and each save: only finite ones are validated and saved. A run that
    fails before its first step keeps the checkpoint that it was resumed from.
    """

    def __init__(self) -> None:
        self._unchecked: list[_Step] = []
        self._batch: tuple[CaptionBatch, int] | None = None
        self._trained = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _refuse_weights(_captioner(pl_module).state_dict().values())  # a checkpoint's

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: CaptionBatch, batch_idx: int
    ) -> None:
        self._batch = batch, batch_idx

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        assert self._batch is not None
        batch, number = self._batch
        finite = loss.detach().isfinite()
        self._unchecked.append(
            _Step(trainer.global_step + 1, number + 1, batch.image_ids, finite, torch.ones_like(finite))
        )
        if loss.device.type == "cpu":
            if not finite and batch.annotations is not None and not all_finite([batch.annotations]):
                raise Diverged(f"cached features are not finite at {self._unchecked[-1]}; extract them again")
            self._check()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if not self._batch or getattr(trainer.precision_plugin, "scaler", None) is not None:
            return  # a gradient scaler skips a step whose float16 gradient overflows
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        finite = torch.nn.utils.get_total_norm(gradients, math.inf).isfinite()
        if finite.device.type == "cpu":
            if not finite:
                raise Diverged(f"training has diverged: the gradient is not finite at {self._last}; {_REMEDY}")
        elif self._unchecked:
            self._unchecked[-1].gradient = finite
            if len(self._unchecked) >= EVERY:
                self._check()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: CaptionBatch, batch_idx: int
    ) -> None:
        self._trained = True

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._check()
        _refuse_weights(_captioner(pl_module).state_dict().values())

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _refuse_weights(_captioner(pl_module).state_dict().values())

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _refuse_weights(_captioner(pl_module).state_dict().values())

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._check()
        # Only the captioner's: an estimator's averages are NaN before its first batch.
        weights = checkpoint["state_dict"].items()
        _refuse_weights(tensor for name, tensor in weights if name.startswith("captioner."))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Diverged) or not self._trained:
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, ModelCheckpoint):
                    callback.save_on_exception = False

    def _check(self) -> None:
        """Check the steps that have not been checked; waits for the device."""
        if not self._unchecked:
            return
        flags = torch.stack([torch.stack([step.loss, step.gradient]) for step in self._unchecked]).tolist()
        for step, (loss, gradient) in zip(self._unchecked, flags, strict=True):
            if not (loss and gradient):
                what = "gradient" if loss else "loss"
                raise Diverged(f"training has diverged: the {what} is not finite at {step}; {_REMEDY}")
        self._last = self._unchecked[-1]
        self._unchecked.clear()


def _refuse_weights(weights: Iterable[Tensor]) -> None:
    if not all_finite(weights):
        raise Diverged(f"training has diverged: the weights are not finite; {_REMEDY}")


def _captioner(module: pl.LightningModule) -> Captioner:
    assert isinstance(module, CaptioningModule) and module.captioner is not None
    return module.captioner


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether every floating-point tensor is finite; waits for the device once."""
    floats = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    # The largest magnitude is NaN or infinite exactly where some element is; a sum might overflow.
    return not floats or bool(torch.nn.utils.get_total_norm(floats, math.inf).isfinite())
