"""What the configuration says of a resumed run, where its checkpoint brings settings of the run before."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, EarlyStopping
from pytorch_lightning.utilities import rank_zero_info


class ResumedSettings(Callback):
    """Lets the configuration win over a checkpoint, which restores these with the optimizer and early stopping:

    - the optimizer's numbers: learning rates, which a schedule scales, weight decay, betas and the like;
    - the patience. A run that had stopped early, and would again, ends before its first step.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._patience = [(each, each.patience) for each in callbacks if isinstance(each, EarlyStopping)]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The optimizers are there, and their checkpoint is not yet read."""
        self._groups = [[_numbers(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for optimizer, configured in zip(trainer.optimizers, self._groups, strict=True):
            for group, numbers in zip(optimizer.param_groups, configured, strict=True):
                _configure(group, numbers)
        for config in trainer.lr_scheduler_configs:
            if hasattr(config.scheduler, "base_lrs"):
                config.scheduler.base_lrs = [group["initial_lr"] for group in config.scheduler.optimizer.param_groups]
        for stopping, patience in self._patience:
            stopping.patience = patience
            if stopping.stopped_epoch and stopping.wait_count >= patience:
                rank_zero_info(f"stopped early, {stopping.wait_count} validations without a better {stopping.monitor}")
                trainer.should_stop = True


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params" and _is_number(value)}


def _is_number(value: Any) -> bool:
    numbers = value if isinstance(value, tuple) else (value,)
    return all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers)


def _configure(group: dict[str, Any], numbers: dict[str, Any]) -> None:
    """Set a group's numbers; a rate that a schedule has scaled is scaled as far."""
    rate = "initial_lr" if "initial_lr" in numbers else "lr"
    before = group.get(rate)
    if rate in numbers and before != numbers[rate]:
        rank_zero_info(f"model.optimizer: the learning rate is {numbers[rate]} from here on; it was {before}")
        group["lr"] = group["lr"] * numbers[rate] / before if before else numbers[rate]
    group.update({name: value for name, value in numbers.items() if name != "lr"})
