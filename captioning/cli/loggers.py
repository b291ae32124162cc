"""The loggers of a run, and the labels that tell runs apart in logs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
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
    loggers = configured if isinstance(configured, list) else [configured]
    loggers = [logger for logger in loggers if not _is_ours(logger)]  # a run's config.yaml has it
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


def _is_ours(logger: Any) -> bool:
    return bool(logger.class_path.endswith("CSVLogger") and logger.init_args.get("name") == "metrics")


_LONGEST_GROUP = 128  # characters that wandb takes
_SAME_VARIANT = re.compile(r"(config|c|import|seed_everything|name|runs|results|ckpt_path|trainer\.logger)\b")
_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def variant_name(config: Any, args: Sequence[str]) -> str | None:
    """Return the group of a run in wandb, which runs that differ only in their seed share.

    It is the name of the config, the names of further configs, and what options change: "shapes_soft attention_dim=64".

    Args:
        config: Parsed settings.
        args: Command line that they come from.
    """
    paths = config.get("config")
    name = config_name(paths)
    if name is None:
        return None
    overlays = [str(config_name(path)) for path in paths[1:]] if isinstance(paths, list) else []
    places = list(_places(config.as_dict()))
    changes = [
        f"{_short_name(option, places)}={_short_value(value, config.get('seed_everything'))}"
        for option, value in sorted(_options(args).items())
        if not _SAME_VARIANT.match(option)
    ]
    group = " ".join([name, *overlays, *changes])
    if len(group) <= _LONGEST_GROUP:
        return group
    digest = hashlib.sha256(group.encode()).hexdigest()[:6]
    return f"{group[: _LONGEST_GROUP - 8]}… {digest}"


def _options(args: Sequence[str]) -> dict[str, str]:
    """Return the values of the options --x=1, --x 1 and --x of a command line by name, as text."""
    options: dict[str, str] = {}
    option = ""
    for arg in args:
        if arg.startswith("--"):
            option, _, options[option] = arg[2:].partition("=")
        elif option and not options[option]:
            options[option] = arg
    return options


def _places(settings: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the keys that lead to every setting, without those that a class's arguments lie under."""
    for key, value in settings.items() if isinstance(settings, dict) else ():
        inner = place if key == "init_args" else (*place, key)
        if inner != place:
            yield inner
        yield from _places(value, inner)


def _short_name(option: str, places: Sequence[tuple[str, ...]]) -> str:
    """Return the end of an option that no other setting has."""
    keys = tuple(key for key in option.split(".") if key not in ("init_args", "class_path"))
    lengths = range(1, len(keys))
    length = next((n for n in lengths if sum(place[-n:] == keys[-n:] for place in places) <= 1), len(keys))
    return ".".join(keys[-length:])


def _short_value(value: str, seed: Any) -> str:
    """Return a value on one line, a class without its module and a run's checkpoint without its seed."""
    if _CLASS_PATH.fullmatch(value):
        return value.rpartition(".")[2]
    return " ".join(of_any_seed(value, seed).split())


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
    netrc = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))
    with contextlib.suppress(OSError):  # it may not be read
        if netrc.is_file() and "wandb" in netrc.read_text(errors="ignore"):
            return
    os.environ["WANDB_MODE"] = "offline"


def say_how_to_upload(run_dir: Path) -> None:
    if any((run_dir / "wandb").glob("offline-run-*")):
        print(f"wandb ran offline; to upload: wandb sync {run_dir}/wandb/offline-run-*")
