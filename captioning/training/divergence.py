"""Training that has diverged is ended at that step, before its weights replace a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from captioning.data.batch import CaptionBatch
from captioning.errors import InputError

EVERY = 32
"""Steps between two looks at the losses on a GPU: looking at one waits for the device."""

_REMEDY = "try a lower learning rate, --trainer.gradient_clip_val 5, or --trainer.precision 32-true"


class Diverged(InputError):
    """The loss or the weights are not finite. Names the batch and its images."""


class _Step(NamedTuple):
    """A loss that was computed.

    Attributes:
        number: optimizer step, from 1.
        batch: number in its epoch, from 1.
        image_ids: (B,).
        finite: () bool; both are on the loss's device.
    """

    number: int
    batch: int
    image_ids: Tensor
    finite: Tensor

    def __str__(self) -> str:
        ids, shown = self.image_ids.tolist(), 8
        more = f" and {len(ids) - shown} more" if len(ids) > shown else ""
        return f"step {self.number} (batch {self.batch} of the epoch, images {', '.join(map(str, ids[:shown]))}{more})"


class StopOnDivergence(Callback):
    """Raises ``Diverged`` where a loss or a weight is not finite; checkpoints are left as they are.

    On a CPU a loss is looked at when it is computed, before it changes a weight. On a GPU that would wait for the
    device in every step: losses are looked at together, every ``EVERY`` steps, and the message still names the step
    that was the first. Weights are looked at before each validation and each save, so that none that is not finite is
    ever validated or saved.
    """

    def __init__(self) -> None:
        self._unseen: list[_Step] = []
        self._before: _Step | None = None  # the step before those
        self._batch: tuple[CaptionBatch, int] | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: CaptionBatch, batch_idx: int
    ) -> None:
        self._batch = batch, batch_idx

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self._batch is None:
            return
        batch, number = self._batch
        on_cpu = loss.device.type == "cpu"
        self._unseen.append(_Step(trainer.global_step + 1, number + 1, batch.image_ids, loss.detach().isfinite()))
        if on_cpu and not self._unseen[-1].finite:
            self._explain(self._unseen[-1], batch, pl_module)
        if on_cpu or len(self._unseen) >= EVERY:
            self._look_at_losses()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look_at_losses()
        self._look_at_weights(pl_module.state_dict().values())

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._look_at_losses()
        self._look_at_weights(checkpoint["state_dict"].values())

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Diverged):
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, ModelCheckpoint):
                    callback.save_on_exception = False

    def _look_at_losses(self) -> None:
        """Look at the losses that were not looked at; waits for the device."""
        if not self._unseen:
            return
        finite = torch.stack([step.finite for step in self._unseen]).tolist()
        for step, good in zip(self._unseen, finite, strict=True):
            if not good:
                raise Diverged(f"training has diverged: the loss is not finite at {step}; {_REMEDY}")
        self._before = self._unseen[-1]
        self._unseen.clear()

    def _explain(self, step: _Step, batch: CaptionBatch, pl_module: pl.LightningModule) -> None:
        """Raise where the loss is not finite for another reason than what was computed from this batch."""
        if batch.annotations is not None and not all_finite([batch.annotations]):
            raise Diverged(f"cached features are not finite at {step}; extract them again")
        if not all_finite(pl_module.state_dict().values()):
            self._look_at_weights(pl_module.state_dict().values())

    def _look_at_weights(self, weights: Iterable[Any]) -> None:
        if not all_finite(weights):
            reason = "the weights are not finite"
            if self._before is not None:
                reason = f"the gradient is not finite at {self._before}"
            raise Diverged(f"training has diverged: {reason}; {_REMEDY}")


def all_finite(tensors: Iterable[Any]) -> bool:
    """Return whether every floating-point tensor is finite; waits for the device once."""
    floats = [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_floating_point()]
    # The largest magnitude is NaN or infinite exactly where some element is; a sum might overflow.
    largest = [tensor.detach().abs().amax().float() for tensor in floats if tensor.numel()]
    return not largest or bool(torch.stack(largest).isfinite().all())
