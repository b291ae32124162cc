"""Resuming a run as if it had never stopped: the state of Lightning's loops, and the settings that may change.

Lightning does not document this state, so pyproject.toml admits only one minor version of Lightning.
"""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_only

from captioning.errors import InputError
from captioning.settings import BATCH_SETTINGS, STATE_SETTINGS, STORAGE_SETTINGS, flatten


def next_batch(trainer: pl.Trainer) -> tuple[int, int]:
    """Return the epoch and the batch, both counted from 0, at which training starts or continues.

    Lightning's loop is ``restarting`` from loading a checkpoint until the first batch. Between two epochs, its counts
    still belong to the previous epoch, so the batch is 0.
    """
    loop: Any = trainer.fit_loop
    progress = loop.epoch_loop.batch_progress
    is_inside_epoch = loop.restarting and not progress.is_last_batch
    return trainer.current_epoch, progress.current.processed if is_inside_epoch else 0


def is_inside_step(trainer: pl.Trainer) -> bool:
    """Return whether the optimizer step needs further batches; a checkpoint would lose the gradient so far.

    Lightning steps after ``accumulate_grad_batches`` batches, and after the last batch of an epoch.
    """
    return bool((trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches) and not trainer.is_last_batch


def unfinished_batches(trainer: pl.Trainer) -> int:
    """Return the number of batches since the last optimizer step. A resumed run repeats them.

    Lightning counts a batch as ``ready`` before its training step, and as ``processed`` after it.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    ready, done, per_step = progress.current.ready, progress.current.processed, trainer.accumulate_grad_batches
    return 0 if ready == done and progress.is_last_batch else ready - done // per_step * per_step


def start_new_epoch(trainer: pl.Trainer) -> None:
    """Let a run that was saved at the end of an epoch begin the next epoch. Call this at the start of training.

    If ``max_steps`` ended the run there, Lightning would end the next epoch after one batch.
    """
    loop: Any = trainer.fit_loop
    epochs = loop.epoch_progress.current
    if epochs.ready == epochs.processed and not loop.epoch_loop.restarted_on_train_batch_end:
        loop.epoch_loop.restarting = False


def rewind(checkpoint: dict[str, Any]) -> None:
    """Set a checkpoint's position back to its last optimizer step, and mark an epoch that was cut short as unfinished.

    Raises InputError if the checkpoint has only a model, without a position to resume from.
    """
    if "loops" not in checkpoint or "random_state" not in checkpoint:
        raise InputError("--ckpt_path: the checkpoint holds the model alone; training cannot resume; see --init_from")
    loop = checkpoint["loops"]["fit_loop"]
    batches = loop["epoch_loop.batch_progress"]
    if unfinished := checkpoint.get("unfinished", 0):
        batches["is_last_batch"] = False
        for span in ("current", "total"):  # the batches of the epoch, and of the run
            batches[span] = dict.fromkeys(batches[span], batches[span]["ready"] - unfinished)
    is_inside_epoch = batches["current"]["ready"] > 0 and not batches["is_last_batch"]
    lacks_end = batches["is_last_batch"] and batches["current"]["completed"] < batches["current"]["ready"]
    for span, epochs in loop["epoch_progress"].items():
        is_counted = epochs["processed"] == epochs["started"]
        if is_inside_epoch and is_counted:  # max_steps or max_time cut it short
            epochs["processed"] = epochs["completed"] = epochs["started"] - 1
        elif lacks_end or (batches["is_last_batch"] and is_counted):  # saved before Lightning completed the epoch
            epochs["processed"] = epochs["completed"] = epochs["started"]
        batches[span]["completed"] += 1 if lacks_end else 0


def compare_settings(checkpoint: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Print the settings that differ from the checkpoint's. Raises InputError if one does not fit its state."""
    ignored = (*STORAGE_SETTINGS, "init_from")
    saved, new = flatten(checkpoint.get("captioning", {}).get("settings") or {}, ignored), flatten(settings, ignored)
    saved["processes"] = checkpoint.get("processes", new["processes"])
    batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    is_inside_epoch = batches["current"]["ready"] and not batches["is_last_batch"]
    differing = [key for key in saved | new if saved.get(key) != new.get(key)]
    for key in differing:
        changes_batches = is_inside_epoch and key in BATCH_SETTINGS
        changes_state = key in STATE_SETTINGS
        if key.startswith(tuple(f"{name}." for name in STATE_SETTINGS)):
            changes_state = key in saved and key in new  # another version of a class may have other arguments
        if changes_batches or changes_state:
            where = "inside an epoch" if changes_batches else "in a resumed run"
            remedy = f"keep {saved.get(key)}, or begin a new run with --init_from"
            raise InputError(f"{key} cannot change to {new.get(key)} {where}; {remedy}")
    if changes := [f"{key}: {new.get(key)}, was {saved.get(key)}" for key in differing]:
        rank_zero_only(print)(f"settings that differ from the checkpoint's: {'; '.join(changes)}", flush=True)
