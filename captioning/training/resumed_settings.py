"""In a resumed run the configuration wins over settings that the checkpoint brings, and each difference is said."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler
from pytorch_lightning.utilities import rank_zero_info

from captioning.errors import InputError, printable

RATE = "learning rate"
Numbers = dict[str, Any]
_OF_THE_PLACE = frozenset(
    "name runs results ckpt_path init_from weights_only trainer.default_root_dir trainer.logger checkpoint.dirpath "
    "last.dirpath".split()
)
"""Settings that say where a run reads and writes, and nothing of how it trains."""


class ResumedSettings(Callback):
    """Applies settings that have changed since the checkpoint, which Lightning would overwrite with the old ones:

    - the arguments of the optimizer that are numbers: learning rates, weight decay, betas and the like. A learning rate
      that a schedule has scaled stays scaled by the same factor. Numbers that are configured as before are left alone;
    - the arguments of a schedule whose rate is a function of the step alone, such as the length of ``PolynomialLR``;
    - the patience of early stopping. A run whose patience is exhausted ends before its first step.

    It also applies the schedule of gradient accumulation in a run that resumes inside an epoch: Lightning applies it
    only when an epoch begins.

    Every setting that differs from the checkpoint's is printed on a line. Another class of optimizer is refused.
    So is a true/false option of the optimizer that has changed, because it may need another state.
    """

    def __init__(self) -> None:
        self._before: list[list[Numbers]] = []
        self._configured: list[list[Numbers]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": self._configured}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = state_dict["optimizers"]

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        before = checkpoint["captioning"].get("settings")
        now: dict[str, Any] = pl_module.settings  # type: ignore[assignment]
        if not (trainer.state.fn == "fit" and isinstance(before, dict)):
            return
        for place, was, value in differences(before, now):
            if place == "model.optimizer":
                raise InputError(
                    f"model.optimizer: {_shown(value)} cannot go on from the state of {_shown(was)}, which the "
                    "checkpoint has; use that one, or begin a new run with the checkpoint's weights: --init_from"
                )
            if place.startswith("model.optimizer.") and isinstance(value, bool):
                raise InputError(
                    f"{place}: was {_shown(was)} in the checkpoint, and a resumed run keeps it; leave it so, or begin "
                    "a new run with the checkpoint's weights: --init_from"
                )
            if place not in _OF_THE_PLACE:
                rank_zero_info(printable(f"{place}: {_shown(value)} from here on; it was {_shown(was)}"))

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._patience = [(stopping, stopping.patience) for stopping in _callbacks(trainer, EarlyStopping)]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # The optimizers exist now, and their state is not restored yet.
        self._configured = [[_numbers(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        self._schedules = [
            (config.scheduler, _arguments(config.scheduler))
            for config in trainer.lr_scheduler_configs
            if hasattr(config.scheduler, "_get_closed_form_lr")
        ]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for optimizer, before, configured in zip(trainer.optimizers, self._before, self._configured, strict=False):
            schedules = [
                config.scheduler for config in trainer.lr_scheduler_configs if config.scheduler.optimizer is optimizer
            ]
            for place, (was, now) in enumerate(zip(before, configured, strict=False)):
                changed = {name: value for name, value in now.items() if was.get(name) != value}
                _configure(optimizer.param_groups[place], changed, was.get(RATE))
                for schedule in schedules if RATE in changed else ():
                    schedule.base_lrs[place] = changed[RATE]
        for schedule, arguments in self._schedules:
            if _arguments(schedule) != arguments:
                vars(schedule).update(arguments)
                for group, rate in zip(schedule.optimizer.param_groups, schedule._get_closed_form_lr(), strict=True):
                    group["lr"] = rate
        for stopping, patience in self._patience:
            stopping.patience = patience
            if stopping.wait_count >= max(1, patience) and trainer.fit_loop._can_stop_early:
                rank_zero_info(
                    f"stopped early, {stopping.wait_count} validations without a better {stopping.monitor}; to go on, "
                    "give more --early_stopping.patience"
                )
                trainer.should_stop = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        for schedule in _callbacks(trainer, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = schedule.get_accumulate_grad_batches(trainer.current_epoch)


def differences(before: Any, now: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (place, value before, value now) of settings that differ.

    The arguments of two different classes are not compared.
    """
    if isinstance(before, dict) and isinstance(now, dict) and _class(before) == _class(now):
        for name in dict.fromkeys([*before, *now]):
            if name != "class_path":
                inner = f"{place}.{name}" if place else str(name)
                yield from differences(before.get(name), now.get(name), inner)
    elif _plain(before) != _plain(now):
        yield place, before, now


def _class(settings: dict[str, Any]) -> str:
    """Return the name of the class that settings describe, "" for none. One class has several paths."""
    return str(settings.get("class_path", "")).rpartition(".")[2]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    """Return a setting as one short text: of a class its path."""
    text = value.get("class_path", value) if isinstance(value, dict) else value
    return "null" if value is None else " ".join(str(text).split())[:80]


def _callbacks(trainer: pl.Trainer, kind: type) -> list[Any]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, kind)]


def _numbers(group: dict[str, Any]) -> Numbers:
    """Return the numbers of a parameter group, with its learning rate as it is before a schedule scales it."""
    numbers = {name: value for name, value in group.items() if name not in ("lr", "initial_lr") and _is_number(value)}
    return numbers | {RATE: group.get("initial_lr", group["lr"])}


def _arguments(schedule: Any) -> dict[str, Any]:
    """Return what a schedule of PyTorch keeps of the arguments that it was made with."""
    names = inspect.signature(type(schedule)).parameters.keys() - {"optimizer", "last_epoch"}
    return {name: value for name, value in vars(schedule).items() if name in names}


def _is_number(value: Any) -> bool:
    numbers = value if isinstance(value, tuple) and value else (value,)
    return all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers)


def _configure(group: dict[str, Any], changed: Numbers, rate: float | None) -> None:
    """Set the changed numbers of a parameter group; its learning rate stays scaled by its schedule.

    Args:
        rate: The configured learning rate before the change.
    """
    if RATE in changed:
        group["lr"] = group["lr"] * changed[RATE] / rate if rate else changed[RATE]
        if "initial_lr" in group:
            group["initial_lr"] = changed[RATE]
    group.update({name: value for name, value in changed.items() if name != RATE})
