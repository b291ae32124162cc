"""What is decided before anything of a run is made: its folder, its checkpoint, its monitored metrics, its loggers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from captioning.errors import InputError, check_range, did_you_mean
from captioning.metrics.table import METRICS, log_key
from captioning.run_folder import RunFolder
from captioning.settings import flatten
from captioning.training.loggers import is_wandb_sweep, logger_settings

BY_NAME = ("best", "last")
"""Values of --ckpt_path that stand for a checkpoint of the run --name."""


@dataclass(frozen=True)
class RunPlan:
    """What is decided before any object of a run exists."""

    folder: RunFolder  # RUNS/NAME, or the first free one of RUNS/NAME-2, RUNS/NAME-3 ..
    taken: RunFolder | None  # RUNS/NAME, if another run has it
    is_new: bool  # whether the folder is to be claimed; a resumed run has its own
    resume: Path | None  # checkpoint that training goes on from
    start: str | None  # model whose weights training begins with
    settings: dict[str, Any]  # changes of the configuration, by dotted key: places, modes of monitors, loggers


def plan_run(config: Mapping[str, Any], files: Sequence[Mapping[str, Any]], folder: str | None = None) -> RunPlan:
    """Decide what a configuration leaves open about a run. Files are looked for, and none is written.

    Args:
        config: The full configuration of `captioning fit`.
        files: The settings of each configuration file, and last those of the command line by dotted key.
        folder: The run's folder, if another process of the run has chosen it.

    Raises:
        InputError: An option of Lightning does not work in this training.
    """
    files = [flatten(file) for file in files]
    _refuse_what_training_cannot_do(config, files)
    name, checkpoint = config["name"], config["ckpt_path"]
    if name is None:  # that of the first file; later ones are overlays
        name = Path(str(config["config"][0])).stem if config["config"] else "run"
        name += f"_{config['seed_everything']}" if is_wandb_sweep() else ""
    run = wanted = RunFolder(Path(folder or Path(config["runs"], name)))
    of = RunFolder.of(checkpoint) if checkpoint else None
    own = of is not None and of.path.resolve() == wanted.path.resolve()
    is_new = not (folder or own or checkpoint in BY_NAME)
    number = 1
    while is_new and run.is_taken():
        number += 1
        run = RunFolder(wanted.path.with_name(f"{wanted.path.name}-{number}"))
    resume = run.checkpoint(checkpoint) if checkpoint in BY_NAME else Path(checkpoint) if checkpoint else None
    settings = {
        "name": run.path.name,
        "runs": str(run.path.parent),
        "ckpt_path": resume and str(resume),
        "trainer.default_root_dir": str(run.path),
        "trainer.logger": logger_settings(config, run.path),
        "checkpoint.dirpath": str(run.checkpoints),
        "last.dirpath": str(run.checkpoints),
    }
    for part in ("checkpoint", "early_stopping"):
        mode = None
        for file in files:  # a new monitor drops the mode of the old
            given = file.get(f"{part}.mode") is not None
            mode = config[part]["mode"] if given else None if f"{part}.monitor" in file else mode
        settings[f"{part}.mode"] = monitor_mode(f"--{part}", config[part]["monitor"], mode)
    start = None if resume else config["init_from"]
    return RunPlan(run, wanted if run is not wanted else None, is_new, resume, start, settings)


def monitor_mode(option: str, monitor: str | None, mode: str | None) -> str:
    """Return min or max for a monitored metric; raise InputError if no such metric is logged or ``mode`` is wrong."""
    if monitor is None:  # the newest checkpoint is kept
        return mode or "min"
    keys = [log_key("val", name) for name, metric in METRICS.items() if metric.in_validation]
    if monitor.startswith("val") and monitor not in keys:
        raise InputError(f"{option}.monitor {monitor}: no validation logs that{did_you_mean(monitor, keys)}")
    metric = METRICS.get(monitor.partition("/")[2])
    metric_mode = metric and metric.better
    if mode is None and metric_mode is None:
        raise InputError(f"{option}.mode: give min or max for {monitor}")
    if metric_mode not in (None, mode or metric_mode):
        raise InputError(f"{option}.mode {mode}: {monitor} is best at its {metric_mode}imum; set it to {metric_mode}")
    return mode or str(metric_mode)


def _refuse_what_training_cannot_do(config: Mapping[str, Any], files: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputError for options of Lightning that the run sets itself or that do not work here."""
    *own_files, words = files
    of_user = [file for file in own_files if not {"name", "runs"} <= file.keys()]  # a run's config.yaml has its places
    for option in (key for file in (*of_user, words) for key, value in file.items() if value):
        if re.fullmatch(r"(checkpoint|last)\.dirpath|trainer\.(default_root_dir|logger\b.*\.(save_)?dir)", option):
            raise InputError(f"--{option}: checkpoints and logs of a run are in RUNS/NAME; give --runs and --name")
        if option == "trainer.use_distributed_sampler":
            raise InputError(f"--{option}: the samplers know the processes; leave it out")
    best, trainer = config["checkpoint"], config["trainer"]
    smallest = {"accumulate_grad_batches": 1, "check_val_every_n_epoch": 1, "val_check_interval": 1e-9}
    for name, low in (smallest | {"gradient_clip_val": 0, "log_every_n_steps": 0}).items():
        if isinstance(trainer[name], (int, float)):  # an interval may be a duration
            check_range(low, **{f"--trainer.{name}": trainer[name]})
    if trainer["enable_checkpointing"] is False:
        instead = "to try something out, give --data.limit_images and --runs"
        raise InputError(f"--trainer.enable_checkpointing false: a run keeps its best and its last weights; {instead}")
    if trainer["overfit_batches"]:
        instead = "give --config configs/overlays/overfit.yaml, or --data.limit_images"
        raise InputError(f"--trainer.overfit_batches: the sampler makes the batches; {instead}")
    if (precision := trainer["precision"]) in ("bf16-true", "16-true"):
        mixed = precision.replace("true", "mixed")
        raise InputError(f"--trainer.precision {precision}: weights are trained in float32; take {mixed}")
    count, filename = best["save_top_k"], best["filename"]
    if count not in (0, 1) and not best["enable_version_counter"] and "{" not in (filename or "{"):
        apart = f"name them apart, as by --checkpoint.filename '{filename}_{{step}}'"
        raise InputError(f"--checkpoint.save_top_k {count}: all would be {filename}.ckpt; {apart}")
