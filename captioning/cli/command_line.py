"""What a command line says before its options are parsed: modules to import, and the run whose config it leaves out."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from captioning.cli.checks import refuse_missing
from captioning.cli.foreign_settings import evaluation_settings, resume_settings
from captioning.cli.usage import values_of
from captioning.configs import read_config
from captioning.run_folder import RunFolder


def split_imports(args: list[str]) -> tuple[list[str], list[str]]:
    """Return the other arguments, and the modules of ``--import``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--import", dest="imports", action="append", default=[])
    known, others = parser.parse_known_args(args)
    return others, known.imports


def with_run_config(args: list[str]) -> list[str]:
    """Add the config of the run that ``--ckpt_path`` lies in where the command line names no config.

    Only data are taken of it: ``foreign_settings`` says which.

    Raises:
        InputError: it is damaged, or chooses what only a config that the user names may choose.
    """
    if values_of(args, "--config", "-c") or not args or args[0] not in ("fit", "validate", "test", "predict"):
        return args
    for checkpoint in values_of(args, "--ckpt_path"):
        if checkpoint not in ("best", "last"):
            refuse_missing(checkpoint)
        folder = RunFolder.of(checkpoint)
        if folder is not None and folder.config.is_file():
            select = resume_settings if args[0] == "fit" else evaluation_settings
            settings = select(read_config(folder.config), folder.config)
            return [args[0], "--config", json.dumps(settings), *args[1:]]
    return args


_SWEEP = "WANDB_SWEEP_ID"
"""Environment variable of a run that an agent of a wandb sweep started."""


def configs_first(args: list[str]) -> list[str]:
    """Return the arguments of a sweep's agent with ``--config=FILE`` first, which would undo options before it.

    Agents pass parameters in an order that wandb does not promise. Other command lines stay as they are.
    """
    if _SWEEP not in os.environ or not args:
        return args
    return [args[0], *sorted(args[1:], key=lambda arg: not arg.startswith("--config="))]


def sweep_name(config: Any) -> str | None:
    """Return CONFIG_SEED for a run of a sweep, whose runs would otherwise all have the config's name."""
    name = config_name(config.get("config"))
    return f"{name}_{config.seed_everything}" if name is not None and _SWEEP in os.environ else None


def config_name(paths: Any) -> str | None:
    """Return the name of the first config file, which names the experiment; later ones are overlays."""
    if not paths:
        return None
    first = paths[0] if isinstance(paths, list) else paths
    return Path(str(getattr(first, "relative", first))).stem
