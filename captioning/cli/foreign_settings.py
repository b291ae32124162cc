"""Settings from files that the user did not name with ``--config``: they may choose data, but no code and no place.

Such files are a checkpoint and the config.yaml of the run that it lies in. A file named with ``--config`` is trusted.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from captioning.cli.allowed_values import checked_arguments, checked_component, checked_plain, is_word
from captioning.data.records import CaptionSource
from captioning.data.shapes import ShapesSource
from captioning.encoders import Encoder
from captioning.errors import InputError, shortened
from captioning.model import Decoder
from captioning.objective import Objective
from captioning.tokenizers import Tokenizer
from captioning.training import CaptionDataModule, CaptioningModule
from captioning.training.callbacks import BestCheckpoint, StopEarly

_PARTS: dict[str, type] = {"encoder": Encoder, "decoder": Decoder, "objective": Objective}
_LIGHTNING_CALLBACKS = frozenset(
    "DeviceStatsMonitor EarlyStopping GradientAccumulationScheduler LearningRateMonitor ModelSummary RichModelSummary "
    "RichProgressBar TQDMProgressBar".split()
)
_OUR_CALLBACKS = frozenset({"CaptionSamples", "Throughput", "Unfreeze", "WeightAverage"})
_WANDB_LOGGERS = frozenset({"captioning.training.WandbRun", "pytorch_lightning.loggers.WandbLogger"})
# The rest of what wandb takes leads elsewhere: its server, its folders, what it reads and uploads.
_WANDB_ARGUMENTS = frozenset(
    "name version offline id project log_model prefix entity notes tags group job_type add_file_policy".split()
)
_SET_BY_THE_COMMAND_LINE = frozenset({"default_root_dir", "use_distributed_sampler", "model_registry"})
_GROUPS: dict[str, type] = {"checkpoint": BestCheckpoint, "last": BestCheckpoint, "early_stopping": StopEarly}


def evaluation_settings(settings: Any, where: str | Path) -> dict[str, Any]:
    """Return seed, model, data and device of a run, and nothing of how it was trained or where it wrote.

    A model is scored in the precision that is best where it is scored.

    Args:
        where: File that the settings come from, for messages.

    Raises:
        InputError: A setting is not plain data, or names an unknown class.
    """
    try:
        return _model_and_data(settings) | {"trainer": _trainer_words(settings, ("accelerator",))}
    except InputError as error:
        raise InputError(_refusal(where, error)) from error


def resume_settings(settings: Any, where: str | Path) -> dict[str, Any]:
    """Return what a resumed run needs: also optimizer, schedule, and trainer with its callbacks and loggers.

    Raises:
        InputError: A setting is there that a file may not choose.
    """
    try:
        allowed = _model_and_data(settings)
        model = settings["model"]
        if model.get("optimizer") is not None:
            allowed["model"]["optimizer"] = _optimizer(model["optimizer"])
        if model.get("scheduler") is not None:
            allowed["model"]["scheduler"] = _of_this_package(model["scheduler"], LRScheduler, "model.scheduler")
        allowed["trainer"] = _trainer(_mapping(settings, "trainer"))
        for group, cls in _GROUPS.items():
            if group in settings:
                options = checked_arguments(settings[group], cls, group)
                options.pop("dirpath", None)
                allowed[group] = {name: _inside(value, f"{group}.{name}") for name, value in options.items()}
        return allowed
    except InputError as error:
        raise InputError(_refusal(where, error)) from error


def _refusal(where: str | Path, error: InputError) -> str:
    return f"{where}: {error}; this file chooses no code: name a config with --config to use it as it is"


def _mapping(settings: Any, name: str) -> Mapping[str, Any]:
    section = settings.get(name) if isinstance(settings, Mapping) else None
    if not isinstance(section, Mapping):
        raise InputError(f"has no {name} settings")
    return section


def _model_and_data(settings: Any) -> dict[str, Any]:
    given = dict(_mapping(settings, "model"))
    parts = {
        name: None if given[name] is None else checked_component(given[name], kind, f"model.{name}")
        for name, kind in _PARTS.items()
        if name in given
    }
    others = {name: value for name, value in given.items() if name not in (*_PARTS, "optimizer", "scheduler")}
    model = parts | checked_arguments(others, CaptioningModule, "model")
    given = {name: value for name, value in _mapping(settings, "data").items() if name != "source"}
    data = checked_arguments(given, CaptionDataModule, "data", Tokenizer)
    for name in (*model, *data):
        if not name.isidentifier():
            raise InputError(f"{name!r} is not a setting")
    data["source"] = _source(settings["data"].get("source"))
    seed = checked_plain(settings.get("seed_everything"), "seed_everything", int)
    return {"model": model, "data": data} | ({} if seed is None else {"seed_everything": seed})


def _source(value: Any) -> dict[str, Any]:
    """Let a source read from anywhere, because data may lie anywhere; but not follow links out of its folder."""
    source = checked_component(value, CaptionSource, "data.source")
    arguments = source.get("init_args", {})
    arguments.pop("allow_outside", None)
    root = arguments.get("root")
    if source["class_path"] == "captioning.data.ShapesSource" and isinstance(root, str):
        if "\0" in root:
            raise InputError(f"data.source: root {shortened(repr(root))} is no name of a folder")
        writes = not os.path.isfile(os.path.join(root, "shapes.json"))  # False also for what is no name
        if writes and not Path(os.path.realpath(root)).is_relative_to(os.path.realpath(".")):
            raise InputError(f"data.source: {ShapesSource.__name__} would write to {root}, outside this folder")
    return source


def _of_this_package(value: Any, kind: type, place: str) -> dict[str, Any]:
    component = checked_component(value, kind, place)
    if not component["class_path"].startswith("captioning."):
        raise InputError(f"{place}: {component['class_path']} is not of this package")
    return component


def _optimizer(value: Any) -> dict[str, Any]:
    path = _class_path(value, "model.optimizer")
    module, _, name = path.rpartition(".")
    cls = getattr(torch.optim, name, None)
    is_optimizer = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    if not is_optimizer or module not in ("torch.optim", cls.__module__):  # type: ignore[union-attr]
        raise InputError(f"model.optimizer: {path} is not an optimizer of torch.optim")
    return _with_arguments(f"torch.optim.{name}", value, "model.optimizer")


def _class_path(value: Any, place: str) -> str:
    path = value.get("class_path") if isinstance(value, Mapping) else None
    if not isinstance(path, str) or set(value) - {"class_path", "init_args"}:
        raise InputError(f"{place}: not a class_path with init_args")
    return path


def _with_arguments(path: str, value: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a class that a file may choose with the plain arguments that the file gives it."""
    module, _, name = path.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    return {"class_path": path, "init_args": checked_arguments(value.get("init_args") or {}, cls, f"{place} {path}")}


def _trainer_words(settings: Any, names: tuple[str, ...]) -> dict[str, Any]:
    trainer = settings.get("trainer")
    trainer = trainer if isinstance(trainer, Mapping) else {}
    return {name: _word(trainer[name], f"trainer.{name}") for name in names if trainer.get(name) is not None}


def _word(value: Any, place: str) -> Any:
    if isinstance(value, str) and not is_word(value):
        raise InputError(f"{place}: {value!r} is not a name")
    if isinstance(value, (list, tuple)):
        return [_word(item, place) for item in value]
    if isinstance(value, Mapping):
        return {name: _word(item, place) for name, item in checked_plain(value, place).items()}
    return checked_plain(value, place)


def _trainer(trainer: Mapping[str, Any]) -> dict[str, Any]:
    allowed: dict[str, Any] = {}
    for name, value in trainer.items():
        place = f"trainer.{name}"
        if not isinstance(name, str) or not name.isidentifier():
            raise InputError(f"{name!r} is not a setting")
        if name in ("plugins", "profiler"):
            if value is not None:
                raise InputError(f"{place}: is set")
        elif name == "logger":
            several = value if isinstance(value, list) else [value]
            allowed[name] = [logger for item in several if (logger := _logger(item)) is not None] or False
        elif name == "callbacks":
            several = value if isinstance(value, list) else [] if value is None else [value]
            allowed[name] = [_callback(item) for item in several] or None
        elif name not in _SET_BY_THE_COMMAND_LINE:
            allowed[name] = _word(value, place)
    return allowed


def _callback(value: Any) -> dict[str, Any]:
    path = _class_path(value, "trainer.callbacks")
    module, _, name = path.rpartition(".")
    if name in _OUR_CALLBACKS and f"{module}.".startswith("captioning.training."):
        path = f"captioning.training.{name}"
    elif not (name in _LIGHTNING_CALLBACKS and module == "pytorch_lightning.callbacks"):
        raise InputError(f"trainer.callbacks: {path} is not one that a file may choose")
    return _with_arguments(path, value, "trainer.callbacks")


def _logger(value: Any) -> dict[str, Any] | None:
    """Return a wandb logger; None for a CSV logger, which every run is given anyway."""
    if value is None or isinstance(value, bool):
        return None
    path = _class_path(value, "trainer.logger")
    if path == "pytorch_lightning.loggers.CSVLogger":
        return None
    if path not in _WANDB_LOGGERS:
        raise InputError(f"trainer.logger: {path} is not one that a file may choose")
    given = value.get("init_args") or {}
    if not isinstance(given, Mapping):
        raise InputError("trainer.logger: the arguments are no mapping")
    for name, argument in given.items():
        if name not in _WANDB_ARGUMENTS and name != "save_dir" and argument:
            raise InputError(f"trainer.logger: {name} of wandb is set")
    chosen = {
        name: _inside(checked_plain(argument, f"trainer.logger.{name}"), f"trainer.logger.{name}")
        for name, argument in given.items()
        if name in _WANDB_ARGUMENTS
    }
    return {"class_path": path, "init_args": {"save_dir": ".", **chosen}}


def _inside(value: Any, place: str) -> Any:
    """Refuse a text that would lead out of the folder when it becomes part of a file's name."""
    if isinstance(value, str) and (os.path.isabs(value) or ".." in Path(value).parts or "\0" in value):
        raise InputError(f"{place}: {value!r} leads elsewhere")
    return value
