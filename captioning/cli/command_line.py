"""What a command line says before its options are parsed: modules to import, and the run whose config applies."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from captioning.cli.foreign_settings import evaluation_settings, resume_settings
from captioning.cli.old_parser import values_of
from captioning.errors import InputError
from captioning.run_folder import RunFolder
from captioning.settings import read_config


def split_imports(args: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without ``--import``, and the modules that it names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--import", dest="imports", action="append", default=[])
    options, remaining = parser.parse_known_args(args)
    return remaining, options.imports


def with_run_config(args: list[str]) -> list[str]:
    """Add the config of the run that ``--ckpt_path`` lies in if the command line names no config.

    ``foreign_settings`` says which of its settings are used.

    Raises:
        InputError: It is damaged, or chooses what only a config that the user names may choose.
    """
    if values_of(args, "--config", "-c") or not args or args[0] not in ("fit", "validate", "test", "predict"):
        return args
    for checkpoint in values_of(args, "--ckpt_path"):
        if checkpoint in ("best", "last"):
            names, runs = values_of(args, "--name"), values_of(args, "--runs") or ["runs"]
            folder = RunFolder(Path(runs[-1], names[-1])) if names else None
        else:
            refuse_missing(checkpoint)
            folder = RunFolder.of(checkpoint)
        if folder is not None:
            folder.refuse_links()
        if folder is not None and folder.config.is_file():
            select = resume_settings if args[0] == "fit" else evaluation_settings
            settings = select(read_config(folder.config), folder.config)
            return [args[0], "--config", json.dumps(settings), *args[1:]]
    return args


def refuse_missing(checkpoint: str) -> None:
    """Refuse a checkpoint that is not there, or that is another kind of file at first sight.

    Raises:
        InputError: Says what it is.
    """
    if not Path(checkpoint).exists():
        raise InputError(f"{checkpoint}: no such checkpoint; give one with --ckpt_path, or train with fit first")


_SWEEP = "WANDB_SWEEP_ID"
"""Environment variable of a run that an agent of a wandb sweep started."""


def configs_first(args: list[str]) -> list[str]:
    """Return the arguments of a sweep's agent with ``--config=FILE`` first, because it would undo options before it.

    wandb does not promise the order in which an agent passes parameters. Other command lines stay as they are.
    """
    if _SWEEP not in os.environ or not args:
        return args
    return [args[0], *sorted(args[1:], key=lambda arg: not arg.startswith("--config="))]


def sweep_name(config: Any) -> str | None:
    """Return CONFIG_SEED for a run of a sweep; otherwise all runs of the sweep would have the config's name."""
    name = config_name(config.get("config"))
    return f"{name}_{config.seed_everything}" if name is not None and _SWEEP in os.environ else None


def config_name(paths: Any) -> str | None:
    """Return the name of the first config file, which names the experiment; later ones are overlays."""
    if not paths:
        return None
    first = paths[0] if isinstance(paths, list) else paths
    return Path(str(getattr(first, "relative", first))).stem
