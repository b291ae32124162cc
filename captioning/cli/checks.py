"""What the command line refuses before work starts, where Lightning would fail late, at length, or not at all."""

from __future__ import annotations

import difflib
import inspect
import sys
import traceback
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping

from captioning.checkpoint.io import damage_of, refuse_other_files, sound_beside
from captioning.data.loading import processors
from captioning.errors import InputError, check_range, one_line
from captioning.evaluation.evaluator import score_names
from captioning.training.preemption import process_rank


def refuse_impossible(config: Any) -> None:
    """Refuse what Lightning would find out late or never: numbers out of range, and too many processes.

    Raises:
        InputError: names the option.
    """
    trainer = config.trainer
    for name, low in (
        ("accumulate_grad_batches", 1),
        ("check_val_every_n_epoch", 1),
        ("val_check_interval", 1e-9),
        ("gradient_clip_val", 0),
        ("log_every_n_steps", 0),
    ):
        value = trainer.get(name)
        if isinstance(value, (int, float)):
            check_range(low, **{f"--trainer.{name}": value})
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


def _refuse_other_schedules(scheduler: Any) -> None:
    """The number of steps of the run stands behind the optimizer, where some of PyTorch's take another number."""
    package, _, name = str(getattr(scheduler, "class_path", None)).rpartition(".")
    if package != "torch.optim.lr_scheduler":
        return
    first, *_ = list(inspect.signature(getattr(torch.optim.lr_scheduler, name)).parameters)[1:]
    if first not in ("T_max", "total_iters", "total_steps"):
        raise InputError(
            f"model.scheduler: {name} does not follow the length of a run; give captioning.training.WarmupCosine, or "
            "CosineAnnealingLR or PolynomialLR of PyTorch"
        )


def refuse_unknown_monitors(trainer: pl.Trainer) -> None:
    """Refuse to watch a score that no validation gives, which would show after the first epoch, or its worst value."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if any(
        type(callback).__module__.split(".")[0] not in ("captioning", "pytorch_lightning") for callback in callbacks
    ):
        return  # one of the user's may log more
    known = [f"val/{name}" for name in sorted(score_names())]
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        option = "early_stopping" if isinstance(callback, EarlyStopping) else "checkpoint"
        if monitor is not None and monitor not in known and not monitor.startswith("train/"):
            near = difflib.get_close_matches(monitor, known, 3, 0.3)
            raise InputError(f"--{option}.monitor {monitor}: no validation logs that; near: {', '.join(near)}")
        if monitor in ("val/nll", "train/loss") and getattr(callback, "mode", None) == "max":
            raise InputError(f"--{option}.monitor {monitor}: the lowest is best; add --{option}.mode min")


def refuse_missing(checkpoint: str) -> None:
    """Refuse what is no checkpoint at the first look.

    Raises:
        InputError: says what it is.
    """
    if not Path(checkpoint).exists():
        raise InputError(f"{checkpoint}: no such checkpoint; give one with --ckpt_path, or train with fit first")
    refuse_other_files(Path(checkpoint))


def sound_or_earlier(checkpoint: Path) -> Path:
    """Return a checkpoint that a run goes on from, or, with one line, the newest sound one beside it if it is damaged.

    Of one that is missing, or has none beside it, the caller finds out.
    """
    if not checkpoint.is_file() or (damage := damage_of(checkpoint)) is None:
        return checkpoint
    if (found := sound_beside(checkpoint)) is None:
        return checkpoint
    if not process_rank():
        print(f"{checkpoint}: damaged ({damage}); going on from {found}, which is sound", file=sys.stderr, flush=True)
    return found


def while_restoring(error: BaseException) -> bool:
    """Return whether an error comes out of Lightning's reading of a checkpoint's content."""
    return any("checkpoint_connector" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


_PARSER = "jsonargparse"


def _is_of_jsonargparse(error: BaseException) -> bool:
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and _PARSER in frames[-1][0].f_code.co_filename


def refusal(error: Exception) -> InputError:
    """Return in one line what a class of the configuration says of its arguments; jsonargparse tells it at length."""
    first: BaseException = error
    while first.__cause__ is not None and not isinstance(first, InputError) and _is_of_jsonargparse(first):
        first = first.__cause__
    if isinstance(first, InputError):
        return first
    constructed: list[str] = []
    for frame, _ in traceback.walk_tb(first.__traceback__):
        if _PARSER in frame.f_code.co_filename:
            constructed = []  # it constructs what stands inside first
        elif frame.f_code.co_name == "__init__" and "self" in frame.f_locals:
            constructed.append(type(frame.f_locals["self"]).__name__)
    return InputError(": ".join([*constructed[:1], one_line(first)]))
