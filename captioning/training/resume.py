"""What a checkpoint has beside the model, so that a resumed run equals one that never stopped, and what may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info

from captioning.errors import InputError
from captioning.settings import LOCATION_SETTINGS, flatten

_OF_BATCHES = (
    "data.batch_size data.group data.captions_per_image data.limit_images seed_everything "
    "trainer.accumulate_grad_batches processes"
).split()
"""Settings that determine the captions of an optimizer step."""


def unfinished_batches(trainer: pl.Trainer) -> int:
    """Return the batches since the last optimizer step, which a resumed run repeats."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    ready, done, per_step = progress.current.ready, progress.current.processed, trainer.accumulate_grad_batches
    return 0 if ready == done and progress.is_last_batch else ready - done // per_step * per_step


def rewind(checkpoint: dict[str, Any]) -> None:
    """Set the position of a checkpoint back to its last optimizer step, and an epoch that was cut short to unfinished.

    Raises:
        InputError: The checkpoint has no position, because it was made to be used and not to be resumed.
    """
    if "loops" not in checkpoint or "random_state" not in checkpoint:
        raise InputError("the checkpoint holds the model alone; training cannot go on from it, see --init_from")
    loop = checkpoint["loops"]["fit_loop"]
    batches = loop["epoch_loop.batch_progress"]
    again = checkpoint.get("unfinished", 0)
    for name in (name for name in checkpoint["state_dict"] if name.endswith(".batches")):
        checkpoint["state_dict"][name] = checkpoint["state_dict"][name] - again
    if again:
        batches["is_last_batch"] = False
        for part in ("current", "total"):
            batches[part] = dict.fromkeys(batches[part], batches[part]["ready"] - again)
    for epochs in loop["epoch_progress"].values() if batches["current"]["ready"] else ():
        if epochs["processed"] == epochs["started"]:  # also where max_steps or max_time cut the epoch short
            epochs["processed"] -= not batches["is_last_batch"]
            epochs["completed"] = epochs["processed"]


def check_settings(checkpoint: Mapping[str, Any], settings: Mapping[str, Any], processes: int) -> None:
    """Log the settings that have changed since the checkpoint, some of which may change between epochs alone.

    Raises:
        InputError: A setting differs with which training cannot go on from the checkpoint's state.
    """
    before = checkpoint.get("captioning", {}).get("settings") or {}
    was, now = (flatten(each, (*LOCATION_SETTINGS, "init_from")) for each in (before, settings))
    was["processes"], now["processes"] = checkpoint.get("processes", processes), processes
    batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    inside = batches["current"]["ready"] and not batches["is_last_batch"]
    names = [name for name in was | now if was.get(name) != now.get(name)]
    for name in names:  # an argument of only one version of a class is no error
        batches_differ = inside and name in _OF_BATCHES
        if batches_differ or (
            name in ("model.optimizer", "model.scheduler", "model.encoder.learning_rate")
            or (name.startswith(("model.optimizer.", "model.scheduler.")) and name in was and name in now)
        ):
            point = "inside the checkpoint's epoch" if batches_differ else "from the checkpoint's state"
            instead = f"leave it {was.get(name)}, or begin a new run with --init_from"
            raise InputError(f"{name}: {now.get(name)} cannot go on {point}; {instead}")
    if changed := [f"{name}: {now.get(name)}, was {was.get(name)}" for name in names]:
        kept = any({"T_max", "total_iters"} & state.keys() for state in checkpoint["lr_schedulers"])
        why = " (the schedule keeps its length; WarmupCosine would take a new one)" * kept
        rank_zero_info(f"settings that differ from the checkpoint's{why}: {'; '.join(changed)}")


def follow_files(states: Mapping[str, dict[str, Any]], callbacks: Sequence[Any]) -> None:
    """Replace the folder in the states of the ``ModelCheckpoint`` callbacks if the run was moved or copied.

    Lightning ignores the state of another folder, and a worse epoch would replace the best.
    """
    for callback in callbacks:
        state = states.get(callback.state_key, {})
        was, now, best = (
            str(state.get("dirpath")),
            str(getattr(callback, "dirpath", None)),
            state.get("best_model_path"),
        )
        if best and Path(best.replace(was, now, 1)).is_file():
            state |= {key: value.replace(was, now, 1) for key, value in state.items() if isinstance(value, str)}
            state["best_k_models"] = {path.replace(was, now, 1): k for path, k in state["best_k_models"].items()}
