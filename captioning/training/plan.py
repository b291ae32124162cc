"""The plan of a run, made before any of its objects: folder, checkpoint, monitored metrics, loggers."""

import itertools
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from captioning.errors import InputError, check_range, did_you_mean
from captioning.metrics.table import METRICS, log_key
from captioning.run_folder import RunFolder
from captioning.training.loggers import logger_settings


@dataclass(frozen=True)
class RunPlan:
    """The decisions about a run that its configuration leaves open."""

    folder: RunFolder  # RUNS/NAME, or the first free one of RUNS/NAME-2, RUNS/NAME-3 ..
    taken_folder: RunFolder | None  # RUNS/NAME, if another run has it
    claims_folder: bool  # False if the run is resumed in its folder, or another process has claimed it
    changes: dict[str, Any]  # to be set in the configuration, by dotted key: paths, modes of monitors, loggers


def plan_run(settings: Mapping[str, Any], option_names: Collection[str], claimed_folder: str | None = None) -> RunPlan:
    """Return the plan of a run. The function looks for files, and writes none.

    Args:
        settings: The full configuration of `captioning fit`.
        option_names: The options on the command line, without --.
        claimed_folder: The run's folder, if another process of the run has claimed it.

    Raises:
        InputError: A checkpoint or monitor does not exist, or an option of Lightning cannot be used here.
    """
    _check_usable(settings, option_names)
    name, checkpoint = settings["name"], settings["ckpt_path"]
    if not name:  # the name of the first file; later files are overlays
        name = Path(str(settings["config"][0])).stem if settings["config"] else "run"
        name += f"_{settings['seed_everything']}" if "WANDB_SWEEP_ID" in os.environ else ""  # wandb's agent runs this
    named_run = RunFolder(Path(claimed_folder or Path(settings["runs"], name)))
    resumed_run = RunFolder.of_checkpoint(checkpoint, named_run.path) if checkpoint else None
    if resumed_run is not None and resumed_run.config.is_file() and not claimed_folder:
        # A resumed run stays in its folder, whatever the configuration says, unless an option names another.
        folder_settings: dict[str, Any] = {"runs": resumed_run.path.parent, "name": resumed_run.path.name}
        folder_settings |= {key: settings[key] for key in folder_settings if key in option_names}
        named_run = RunFolder(Path(folder_settings["runs"], folder_settings["name"]))
    run = named_run
    is_same_run = resumed_run is not None and resumed_run.path.resolve() == named_run.path.resolve()
    claims_folder = not (claimed_folder or is_same_run)
    numbers = itertools.count(2)
    while claims_folder and run.is_taken():
        run = RunFolder(named_run.path.with_name(f"{named_run.path.name}-{next(numbers)}"))
    changes = {
        "name": run.path.name,
        "runs": str(run.path.parent),
        "ckpt_path": str(run.checkpoint(checkpoint)) if checkpoint else None,
        "trainer.default_root_dir": str(run.path),
        "trainer.logger": logger_settings(settings, run.path),
        "checkpoint.dirpath": str(run.checkpoints),
        "last.dirpath": str(run.checkpoints),
    }
    for callback in ("checkpoint", "early_stopping"):
        monitor, mode = settings[callback]["monitor"], settings[callback]["mode"]
        changes[f"{callback}.mode"] = monitor_mode(f"--{callback}", monitor, mode)
    return RunPlan(run, named_run if run is not named_run else None, claims_folder, changes)


def monitor_mode(option: str, monitor: str | None, mode: str | None) -> str:
    """Return min or max for a monitored metric. Raises InputError if no such metric is logged or ``mode`` is wrong."""
    if monitor is None:  # the newest checkpoint is kept
        return mode or "min"
    keys = [log_key("val", name) for name, metric in METRICS.items() if metric.in_validation]
    if monitor not in keys and (monitor.startswith("val") or monitor in METRICS):
        raise InputError(f"{option}.monitor {monitor}: no validation logs that{did_you_mean(monitor, keys)}")
    metric = METRICS.get(monitor.partition("/")[2])
    metric_mode = metric and metric.mode
    if mode is None and metric_mode is None:
        raise InputError(f"{option}.mode: give min or max for {monitor}")
    if metric_mode not in (None, mode or metric_mode):
        raise InputError(f"{option}.mode {mode}: {monitor} is best at its {metric_mode}imum; set it to {metric_mode}")
    return mode or str(metric_mode)


def _check_usable(settings: Mapping[str, Any], option_names: Collection[str]) -> None:
    """Raise InputError if an option of Lightning has no effect here or is set by the run."""
    storage_options = re.compile(r"(checkpoint|last)\.dirpath|trainer\.(default_root_dir|logger\b.*\.(save_)?dir)")
    for option in option_names:
        if storage_options.fullmatch(option):
            raise InputError(f"--{option}: checkpoints and logs of a run are in RUNS/NAME; give --runs and --name")
    checkpoint, trainer = settings["checkpoint"], settings["trainer"]
    # Lightning would divide by 0, and a negative norm would reverse the gradients.
    for name, low in {"accumulate_grad_batches": 1, "check_val_every_n_epoch": 1, "gradient_clip_val": 0}.items():
        check_range(low, **{f"--trainer.{name}": trainer[name]})
    if trainer["overfit_batches"]:
        raise InputError("--trainer.overfit_batches: has no effect; give --config configs/overlays/overfit.yaml")
    if (precision := trainer["precision"]) in ("bf16-true", "16-true"):
        mixed = precision.replace("true", "mixed")
        raise InputError(f"--trainer.precision {precision}: weights are trained in float32; give {mixed}")
    count, filename = checkpoint["save_top_k"], checkpoint["filename"]
    if count not in (0, 1) and not checkpoint["enable_version_counter"] and "{" not in (filename or "{"):
        remedy = f"name them apart, as by --checkpoint.filename '{filename}_{{step}}'"
        raise InputError(f"--checkpoint.save_top_k {count}: all would be {filename}.ckpt; {remedy}")
