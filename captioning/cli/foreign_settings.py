"""What is taken of settings that the user did not name with ``--config``: data, which choose no code and no place.

They are those inside a checkpoint, and the config.yaml of the run that a checkpoint lies in. A file named with
``--config`` is the user's own and is used as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from captioning.configs import checked_component, checked_plain
from captioning.data.records import CaptionSource
from captioning.data.shapes import ShapesSource
from captioning.encoders import Encoder
from captioning.errors import InputError
from captioning.model import Decoder
from captioning.objective.estimators import Estimator
from captioning.objective.terms import Reduction
from captioning.tokenizers import Tokenizer

_PARTS: dict[str, type] = {
    "encoder": Encoder,
    "decoder": Decoder,
    "estimator": Estimator,
    "reduction": Reduction,
}
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
_WORD = re.compile(r"[\w:,=-]*")  # a name such as "16-mixed"; with a dot, jsonargparse would import a class


def evaluation_settings(settings: Any, where: str | Path) -> dict[str, Any]:
    """Return seed, model, data, device and precision of a run; nothing of how it was trained or what it wrote where.

    Args:
        where: the file that they come from, for messages.

    Raises:
        InputError: something in them is no plain data, or names a class that is not known here.
    """
    try:
        return _model_and_data(settings) | {"trainer": _trainer_words(settings, ("accelerator", "precision"))}
    except InputError as error:
        raise InputError(_refusal(where, error)) from error


def resume_settings(settings: Any, where: str | Path) -> dict[str, Any]:
    """Return what a run goes on with: also the optimizer, the schedule, and the trainer with its known parts.

    Raises:
        InputError: something is set that a file may not choose.
    """
    try:
        found = _model_and_data(settings)
        model = settings["model"]
        if model.get("optimizer") is not None:
            found["model"]["optimizer"] = _optimizer(model["optimizer"])
        if model.get("scheduler") is not None:
            found["model"]["scheduler"] = _of_this_package(model["scheduler"], LRScheduler, "model.scheduler")
        found["trainer"] = _trainer(_mapping(settings, "trainer"))
        for group in ("checkpoint", "last", "early_stopping"):
            if group in settings:
                options = checked_plain(_mapping(settings, group), group)
                options.pop("dirpath", None)
                found[group] = {name: _inside(value, f"{group}.{name}") for name, value in options.items()}
        return found
    except InputError as error:
        raise InputError(_refusal(where, error)) from error


def _refusal(where: str | Path, error: InputError) -> str:
    return f"{where}: {error}; this file chooses no code: name a config with --config to use it as it is"


def _mapping(settings: Any, name: str) -> Mapping[str, Any]:
    found = settings.get(name) if isinstance(settings, Mapping) else None
    if not isinstance(found, Mapping):
        raise InputError(f"has no {name} settings")
    return found


def _model_and_data(settings: Any) -> dict[str, Any]:
    model: dict[str, Any] = {}
    for name, value in _mapping(settings, "model").items():
        if name in _PARTS and value is not None:
            model[name] = checked_component(value, _PARTS[name], f"model.{name}")
        elif name not in ("optimizer", "scheduler"):
            model[name] = checked_plain(value, f"model.{name}")
    if isinstance(model.get("search"), str):  # the name of another file
        raise InputError("model.search: not a mapping")
    data = dict(_mapping(settings, "data"))
    source = _source(data.pop("source", None))
    tokenizer = data.pop("tokenizer", None)
    seed = checked_plain(settings.get("seed_everything"), "seed_everything")
    options = {name: checked_plain(value, f"data.{name}") for name, value in data.items()}
    for name in (*model, *options):
        if not (isinstance(name, str) and name.isidentifier()):  # jsonargparse reads "a.b" as a level of its own
            raise InputError(f"{name!r} is not a setting")
    if tokenizer is not None:
        options["tokenizer"] = checked_component(tokenizer, Tokenizer, "data.tokenizer")
    found: dict[str, Any] = {"model": model, "data": {**options, "source": source}}
    return found if seed is None else found | {"seed_everything": seed}


def _source(value: Any) -> dict[str, Any]:
    """A source may read anywhere, as the user's data lie anywhere; what leaves its folder is the user's to allow."""
    source = checked_component(value, CaptionSource, "data.source")
    arguments = source.get("init_args", {})
    arguments.pop("allow_outside", None)
    root = arguments.get("root")
    if source["class_path"] == "captioning.data.ShapesSource" and root is not None:
        writes = not os.path.isfile(os.path.join(root, "shapes.json"))  # False also for what is no name
        if writes and not Path(os.path.abspath(root)).is_relative_to(Path.cwd()):
            raise InputError(f"data.source: {ShapesSource.__name__} would write to {root}, outside this folder")
    return source


def _of_this_package(value: Any, kind: type, place: str) -> dict[str, Any]:
    found = checked_component(value, kind, place)
    if not found["class_path"].startswith("captioning."):
        raise InputError(f"{place}: {found['class_path']} is not of this package")
    return found


def _optimizer(value: Any) -> dict[str, Any]:
    path, arguments = _class_and_arguments(value, "model.optimizer")
    module, _, name = path.rpartition(".")
    cls = getattr(torch.optim, name, None)
    known = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    if not known or module not in ("torch.optim", cls.__module__):  # type: ignore[union-attr]
        raise InputError(f"model.optimizer: {path} is not an optimizer of torch.optim")
    return {"class_path": f"torch.optim.{name}", "init_args": arguments}


def _class_and_arguments(value: Any, place: str) -> tuple[str, dict[str, Any]]:
    path = value.get("class_path") if isinstance(value, Mapping) else None
    if not isinstance(path, str) or set(value) - {"class_path", "init_args"}:
        raise InputError(f"{place}: not a class_path with init_args")
    arguments = checked_plain(value.get("init_args") or {}, f"{place} {path}")
    if not isinstance(arguments, dict):
        raise InputError(f"{place}: the init_args of {path} are no mapping")
    return path, arguments


def _trainer_words(settings: Any, names: tuple[str, ...]) -> dict[str, Any]:
    trainer = settings.get("trainer")
    trainer = trainer if isinstance(trainer, Mapping) else {}
    return {name: _word(trainer[name], f"trainer.{name}") for name in names if trainer.get(name) is not None}


def _word(value: Any, place: str) -> Any:
    if isinstance(value, str) and not _WORD.fullmatch(value):
        raise InputError(f"{place}: {value!r} is not a name")
    if isinstance(value, (list, tuple)):
        return [_word(item, place) for item in value]
    if isinstance(value, Mapping):
        return {name: _word(item, place) for name, item in checked_plain(value, place).items()}
    return checked_plain(value, place)


def _trainer(trainer: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in trainer.items():
        place = f"trainer.{name}"
        if not isinstance(name, str) or not name.isidentifier():
            raise InputError(f"{name!r} is not a setting")
        if name in ("plugins", "profiler"):
            if value is not None:
                raise InputError(f"{place}: is set")
        elif name == "logger":
            several = value if isinstance(value, list) else [value]
            found[name] = [logger for item in several if (logger := _logger(item)) is not None] or False
        elif name == "callbacks":
            several = value if isinstance(value, list) else [] if value is None else [value]
            found[name] = [_callback(item) for item in several] or None
        elif name not in _SET_BY_THE_COMMAND_LINE:
            found[name] = _word(value, place)
    return found


def _callback(value: Any) -> dict[str, Any]:
    path, arguments = _class_and_arguments(value, "trainer.callbacks")
    module, _, name = path.rpartition(".")
    ours = name in _OUR_CALLBACKS and module in ("captioning.training", "captioning.callbacks")
    if not ours and not (name in _LIGHTNING_CALLBACKS and module == "pytorch_lightning.callbacks"):
        raise InputError(f"trainer.callbacks: {path} is not one that a file may choose")
    return {"class_path": path, "init_args": arguments}


def _logger(value: Any) -> dict[str, Any] | None:
    """Return a wandb logger; None for a CSV logger, which every run gets anew."""
    if value is None or isinstance(value, bool):
        return None
    path, arguments = _class_and_arguments(value, "trainer.logger")
    if path == "pytorch_lightning.loggers.CSVLogger":
        return None
    if path not in _WANDB_LOGGERS:
        raise InputError(f"trainer.logger: {path} is not one that a file may choose")
    arguments.pop("save_dir", None)  # the run's folder
    for name, argument in arguments.items():
        if name not in _WANDB_ARGUMENTS and argument:
            raise InputError(f"trainer.logger: {name} of wandb is set")
    chosen = {
        name: _inside(arguments[name], f"trainer.logger.{name}") for name in arguments if name in _WANDB_ARGUMENTS
    }
    return {"class_path": path, "init_args": {"save_dir": ".", **chosen}}


def _inside(value: Any, place: str) -> Any:
    """Return a text that cannot lead out of the folder which a file's name begins with."""
    if isinstance(value, str) and (os.path.isabs(value) or ".." in Path(value).parts or "\0" in value):
        raise InputError(f"{place}: {value!r} leads elsewhere")
    return value
