"""Refusals before work starts, of what Lightning would notice late, explain at length, or not notice at all."""

from __future__ import annotations

import inspect
import math
import os
import traceback
from typing import Any

import torch

from captioning.data.loading import processors
from captioning.errors import InputError, check_range, one_line

_CALLBACKS = "pytorch_lightning.callbacks"
_COPIES = ("ddp_fork", "ddp_notebook", "ddp_spawn")  # and their _find_unused_parameters_true


def refuse_impossible(config: Any) -> None:
    """Refuse numbers out of range, too many processes, and options that contradict each other.

    Raises:
        InputError: Names the option.
    """
    trainer = config.trainer
    for name, low, high in (
        ("accumulate_grad_batches", 1, 2**31),
        ("check_val_every_n_epoch", 1, math.inf),
        ("val_check_interval", 1e-9, math.inf),
        ("gradient_clip_val", 0, 1e38),
        ("log_every_n_steps", 0, math.inf),
    ):
        value = trainer.get(name)
        if isinstance(value, (int, float)):
            check_range(low, **{f"--trainer.{name}": value})  # first: the message for 0 then names no upper bound
            check_range(low, high, **{f"--trainer.{name}": value})
    if str(trainer.get("strategy")).startswith(_COPIES):
        raise InputError(
            f"--trainer.strategy {trainer.strategy}: copies the run into its processes, which open files do not "
            "survive; give ddp, which starts them anew"
        )
    check_range(0, **{"--early_stopping.patience": config.early_stopping.patience})
    if trainer.get("limit_val_batches") == 0:
        raise InputError("--trainer.limit_val_batches 0: validation chooses the best checkpoint; give at least 1")
    if trainer.get("overfit_batches"):
        raise InputError("--trainer.overfit_batches: give --data.limit_images N to train on few images")
    if trainer.get("reload_dataloaders_every_n_epochs"):
        raise InputError("--trainer.reload_dataloaders_every_n_epochs: would begin each epoch anew; leave it out")
    precision = str(trainer.get("precision"))
    if config.data.get("features") and precision in ("bf16-true", "16-true", "64-true"):
        raise InputError(
            f"--trainer.precision {precision}: changes the encoder, whose weights cached features are checked against; "
            "give bf16-mixed, 16-mixed or 32-true"
        )
    if precision in ("bf16-true", "16-true"):
        raise InputError(
            f"--trainer.precision {precision}: such weights are too coarse for small updates, and PyTorch cannot "
            "initialise them orthogonally; give auto, bf16-mixed, 16-mixed or 32-true"
        )
    if trainer.get("num_nodes", 1) != 1 and not {"MASTER_ADDR", "SLURM_JOB_ID", "LSB_JOBID"} & os.environ.keys():
        raise InputError(
            f"--trainer.num_nodes {trainer.num_nodes}: nothing has started the run on other machines, for which it "
            "would wait; give 1, or start it with torchrun or SLURM"
        )
    _refuse_unfit_callbacks(trainer.get("callbacks"))
    _refuse_other_schedules(config.model.get("scheduler"))
    checkpoint = config.checkpoint
    if checkpoint.save_top_k not in (0, 1) and "{" not in (checkpoint.filename or "{"):
        raise InputError(
            f"--checkpoint.save_top_k {checkpoint.save_top_k}: all would be {checkpoint.filename}.ckpt; give "
            "--checkpoint.filename a number, such as best-{epoch}"
        )
    on_cpu = trainer.accelerator == "cpu" or (trainer.accelerator == "auto" and not torch.cuda.is_available())
    devices = str(trainer.devices)
    limit = max(8, processors())
    if on_cpu and devices.isdigit() and int(devices) > limit:
        raise InputError(f"--trainer.devices {devices}: {processors()} processors are here; give at most {limit}")


def refuse_empty_paths(config: Any) -> None:
    """Refuse an empty text in a file of settings where a path belongs, which would be taken for none.

    Raises:
        InputError: Names the setting.
    """
    for name in ("name", "runs", "results", "init_from", "ckpt_path"):
        if config.get(name) == "":
            raise InputError(f"{name}: has an empty value; give one, or null")


_AVERAGES = "copies the run with its open files, which fails; give captioning.training.WeightAverage"
_UNFIT = {
    "StochasticWeightAveraging": _AVERAGES,
    "WeightAveraging": _AVERAGES,
    "EMAWeightAveraging": _AVERAGES,
    "BatchSizeFinder": "would change a value that config.yaml has recorded; give --data.batch_size",
    "LearningRateFinder": "would change a value that config.yaml has recorded; give --model.optimizer.lr",
    "Timer": "cannot be written into the config of the run; give --trainer.max_time",
}
"""Callbacks of Lightning that cannot serve a run of this package, with the reason and what to give instead."""


def _refuse_unfit_callbacks(callbacks: Any) -> None:
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        package, _, name = str(getattr(callback, "class_path", None)).rpartition(".")
        if package.startswith(_CALLBACKS) and name in _UNFIT:
            raise InputError(f"trainer.callbacks: {name}: {_UNFIT[name]}")


def _refuse_other_schedules(scheduler: Any) -> None:
    """Refuse PyTorch's schedules whose second argument is not the number of steps of the run."""
    package, _, name = str(getattr(scheduler, "class_path", None)).rpartition(".")
    if package != "torch.optim.lr_scheduler":
        return
    first, *_ = list(inspect.signature(getattr(torch.optim.lr_scheduler, name)).parameters)[1:]
    if first not in ("T_max", "total_iters", "total_steps"):
        raise InputError(
            f"model.scheduler: {name} does not follow the length of a run; give captioning.training.WarmupCosine, or "
            "CosineAnnealingLR or PolynomialLR of PyTorch"
        )


def foreign_callback(error: BaseException) -> str | None:
    """Return the name of the callback in which an error was raised, None if that is this package's own or none."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        kind = type(frame.f_locals.get("self"))
        is_callback = any(base.__module__.startswith(_CALLBACKS) for base in kind.__mro__)
        if is_callback and not kind.__module__.startswith("captioning."):
            return kind.__name__
    return None


def while_restoring(error: BaseException) -> bool:
    """Return whether an error comes out of Lightning's reading of a checkpoint's content."""
    return any("checkpoint_connector" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


_PARSER = "jsonargparse"


def _is_of_jsonargparse(error: BaseException) -> bool:
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and _PARSER in frames[-1][0].f_code.co_filename


REFUSALS = (ValueError, RuntimeError, TypeError, AssertionError, KeyError)
"""What constructors of encoders and other parts raise where their arguments do not fit."""


def refusal(error: Exception) -> InputError:
    """Return in one line what a class of the configuration says of its arguments; jsonargparse needs many."""
    first: BaseException = error
    while first.__cause__ is not None and not isinstance(first, InputError) and _is_of_jsonargparse(first):
        first = first.__cause__
    if isinstance(first, InputError):
        return first
    constructed: list[str] = []
    for frame, _ in traceback.walk_tb(first.__traceback__):
        if _PARSER in frame.f_code.co_filename:
            constructed = []  # it constructs inner classes first
        elif frame.f_code.co_name == "__init__" and "self" in frame.f_locals:
            constructed.append(type(frame.f_locals["self"]).__name__)
    return InputError(": ".join([*constructed[:1], one_line(first)]))
