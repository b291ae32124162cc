"""What a run shows on a terminal: a progress bar that counts epochs from 1, and how large the model's parts are."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, ModelSummary, RichModelSummary, RichProgressBar
from torch import nn

from captioning.model.captioner import Captioner
from captioning.training.module import CaptioningModule


class EpochBar(RichProgressBar):
    """Lightning's bar; counts epochs from 1, as the lines of the log do, and shows no number of the logger's."""

    def _get_train_description(self, current_epoch: int) -> str:
        last = self.trainer.max_epochs
        shown = f"epoch {current_epoch + 1}" + (f"/{last}" if last is not None and last > 0 else "")
        return f"{shown:{len(self.validation_description)}}"  # bars of one width do not flicker

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics


class PartSizes(Callback):
    """One line before training: the parameters of encoder, attention and the rest of the decoder."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, CaptioningModule) and pl_module.captioner is not None
        if not trainer.is_global_zero:
            return
        parts = part_sizes(pl_module.captioner)
        trained = parts.pop("trained")
        sizes = ", ".join(f"{name} {count:,}" for name, count in parts.items())
        print(f"parameters: {sizes}; {trained:,} of {sum(parts.values()):,} are trained", flush=True)


def part_sizes(captioner: Captioner) -> dict[str, int]:
    """Return the parameters of "encoder", "attention" and the rest of "decoder", and how many of all are "trained"."""
    encoder, decoder = captioner.encoder, captioner.decoder
    attention = sum(_count(each) for each in decoder.attentions())
    parts = {"encoder": _count(encoder), "attention": attention, "decoder": _count(decoder) - attention}
    return parts | {"trained": _count(encoder, trained=True) + _count(decoder, trained=True)}


def _count(module: nn.Module, *, trained: bool = False) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


_OWN: dict[type, type[Callback]] = {RichProgressBar: EpochBar, ModelSummary: PartSizes, RichModelSummary: PartSizes}


def with_own_displays(callbacks: list[Callback]) -> list[Callback]:
    """Return the callbacks with this module's in the place of Lightning's of the same purpose."""
    return [_OWN[type(callback)]() if type(callback) in _OWN else callback for callback in callbacks]
