"""The loggers of a run, and the labels that tell runs apart in logs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from captioning.cli.command_line import config_name
from captioning.provenance import provenance
from captioning.run_folder import of_any_seed


def run_loggers(configured: Any, run_dir: Path, group: str | None) -> Any:
    """Point the configured loggers at the run's folder and add a CSV logger, whose file survives a killed process.

    A wandb logger is named after the run. What its config leaves open gets defaults that keep a project in order.
    """
    if configured in (None, False, True):
        configured = []
    loggers = list(configured) if isinstance(configured, list) else [configured]
    for logger in loggers:
        if "save_dir" in logger.init_args:
            logger.init_args.save_dir = str(run_dir)
        if logger.class_path.endswith(("WandbLogger", "WandbRun")):
            logger.class_path = "captioning.training.WandbRun"
            logger.init_args.pop("experiment", None)  # an object, which no config can hold
            project = os.environ.get("WANDB_PROJECT", "captioning")
            defaults = {"name": run_dir.name, "project": project, "group": group, "job_type": "train"}
            for name, value in defaults.items():
                logger.init_args[name] = logger.init_args.get(name) or value
    csv = Namespace(
        class_path="pytorch_lightning.loggers.CSVLogger",
        init_args=Namespace(
            save_dir=str(run_dir), name="metrics", version=None, prefix="", flush_logs_every_n_steps=100
        ),
    )
    return [*loggers, csv]


# Settings in which the runs of one variant differ, and those that say where a run lies.
_OF_A_RUN = (
    "seed_everything name runs results config ckpt_path trainer.logger trainer.default_root_dir "
    "checkpoint.dirpath last.dirpath"
).split()
_SAME_VARIANT = re.compile(r"--(seed_everything|name|runs|ckpt_path|trainer\.logger)\b")


def variant_name(config: Any, args: Sequence[str]) -> str | None:
    """Return the group of a run in wandb, which runs that differ only in their seed share.

    It is the name of the config, followed by a hash of all settings where more is set than seed and place of the run.

    Args:
        config: Parsed settings.
        args: Command line that they come from.
    """
    name = config_name(config.get("config"))
    options = [arg.partition("=")[0] for arg in args if arg.startswith("-")]
    configs = sum(option in ("--config", "-c") for option in options)
    changes = [option for option in options if option not in ("--config", "-c") and not _SAME_VARIANT.match(option)]
    if name is None or (configs == 1 and not changes):
        return name
    settings = config.clone()
    for place in _OF_A_RUN:
        settings.pop(place, None)
    settings = settings.as_dict()
    if settings.get("init_from"):
        settings["init_from"] = of_any_seed(settings["init_from"], config.get("seed_everything"))
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
    return f"{name}-{digest[:6]}"


def run_labels(settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the settings that distinguish runs, under short names, and the provenance of the run."""
    decoder = settings["model"]["decoder"]["init_args"]
    attention = decoder["attention"]
    score = attention.get("init_args", {}).get("score") or {}
    return {
        "attention": attention["class_path"].rpartition(".")[2],
        "score": score.get("class_path", "").rpartition(".")[2] or None,
        "encoder": settings["model"]["encoder"]["class_path"].rpartition(".")[2],
        "seed": seed,
        "provenance": provenance(command=shlex.join(sys.argv), seed=seed),
    }


def wandb_offline_without_account() -> None:
    """Let wandb log offline where nobody is logged in. Otherwise it would ask, or fail where it cannot ask."""
    if "WANDB_MODE" in os.environ or os.environ.get("WANDB_API_KEY"):
        return
    netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    if netrc.is_file() and "wandb" in netrc.read_text(errors="ignore"):
        return
    os.environ["WANDB_MODE"] = "offline"


def say_how_to_upload(run_dir: Path) -> None:
    if any((run_dir / "wandb").glob("offline-run-*")):
        print(f"wandb ran offline; to upload: wandb sync {run_dir}/wandb/offline-run-*")
