"""Settings from files that the user did not name with ``--config``: they may choose data, but no code and no place.

Such files are a checkpoint and the config.yaml of the run that it lies in. A file named with ``--config`` is trusted.
"""

from __future__ import annotations

import collections.abc
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
import yaml
from torch.optim.lr_scheduler import LRScheduler

from captioning.component import Component, known_class, public_path
from captioning.data.records import CaptionSource
from captioning.data.shapes import ShapesSource
from captioning.encoders import Encoder
from captioning.errors import InputError
from captioning.model import Decoder
from captioning.objective import Objective
from captioning.settings import load_yaml
from captioning.tokenizers import Tokenizer

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
_WORD = re.compile(r"[\w:,=-]*")  # a name such as "16-mixed"; with a dot, jsonargparse would import a class


def evaluation_settings(settings: Any, where: str | Path) -> dict[str, Any]:
    """Return seed, model, data, device and precision of a run, and nothing of how it was trained or where it wrote.

    Args:
        where: File that the settings come from, for messages.

    Raises:
        InputError: A setting is not plain data, or names an unknown class.
    """
    try:
        return _model_and_data(settings) | {"trainer": _trainer_words(settings, ("accelerator", "precision"))}
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
        for group in ("checkpoint", "last", "early_stopping"):
            if group in settings:
                options = checked_plain(_mapping(settings, group), group)
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
    model: dict[str, Any] = {}
    for name, value in _mapping(settings, "model").items():
        if name in _PARTS and value is not None:
            model[name] = checked_component(value, _PARTS[name], f"model.{name}")
        elif name not in ("optimizer", "scheduler"):
            model[name] = checked_plain(value, f"model.{name}")
    data: dict[str, Any] = {}
    for name, value in _mapping(settings, "data").items():
        if name == "vocabulary":
            data[name] = _vocabulary(value)
        elif name != "source":
            data[name] = checked_plain(value, f"data.{name}")
    for name in (*model, *data):
        if not (isinstance(name, str) and name.isidentifier()):  # jsonargparse reads "a.b" as two levels
            raise InputError(f"{name!r} is not a setting")
    for place, value in (("model.search", model.get("search")), ("data.augmentation", data.get("augmentation"))):
        if isinstance(value, str):  # the name of another file
            raise InputError(f"{place}: not a mapping")
    data["source"] = _source(settings["data"].get("source"))
    seed = checked_plain(settings.get("seed_everything"), "seed_everything")
    return {"model": model, "data": data} | ({} if seed is None else {"seed_everything": seed})


def _vocabulary(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError("data.vocabulary: not a mapping")
    plain = {name: option for name, option in value.items() if name != "tokenizer"}
    options: dict[str, Any] = checked_plain(plain, "data.vocabulary")
    if value.get("tokenizer") is not None:
        options["tokenizer"] = checked_component(value["tokenizer"], Tokenizer, "data.vocabulary.tokenizer")
    return options


def _source(value: Any) -> dict[str, Any]:
    """Let a source read from anywhere, because data may lie anywhere; but not follow links out of its folder."""
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
    component = checked_component(value, kind, place)
    if not component["class_path"].startswith("captioning."):
        raise InputError(f"{place}: {component['class_path']} is not of this package")
    return component


def _optimizer(value: Any) -> dict[str, Any]:
    path, arguments = _class_and_arguments(value, "model.optimizer")
    module, _, name = path.rpartition(".")
    cls = getattr(torch.optim, name, None)
    is_optimizer = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    if not is_optimizer or module not in ("torch.optim", cls.__module__):  # type: ignore[union-attr]
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
    path, arguments = _class_and_arguments(value, "trainer.callbacks")
    module, _, name = path.rpartition(".")
    if name in _OUR_CALLBACKS and f"{module}.".startswith("captioning.training."):
        path = f"captioning.training.{name}"
    elif not (name in _LIGHTNING_CALLBACKS and module == "pytorch_lightning.callbacks"):
        raise InputError(f"trainer.callbacks: {path} is not one that a file may choose")
    return {"class_path": path, "init_args": arguments}


def _logger(value: Any) -> dict[str, Any] | None:
    """Return a wandb logger; None for a CSV logger, which every run is given anyway."""
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
    """Refuse a text that would lead out of the folder when it becomes part of a file's name."""
    if isinstance(value, str) and (os.path.isabs(value) or ".." in Path(value).parts or "\0" in value):
        raise InputError(f"{place}: {value!r} leads elsewhere")
    return value


# Components and plain values


def checked_component(value: Any, kind: type, place: str) -> dict[str, Any]:
    """Return a ``class_path`` with ``init_args`` in which jsonargparse finds nothing to run but known classes.

    Every level is checked, because jsonargparse constructs the classes that it finds in an argument of any type, even
    in a string, and imports the module that a string names where it expects a class.

    Args:
        kind: Class that must be the value's base; classes in its arguments may also be any ``Component``.
        place: Its place in the configuration, for messages.

    Raises:
        InputError: A class is unknown or of another kind, or a value is neither plain data nor a class.
    """
    value = {"class_path": value} if isinstance(value, str) else value
    if not isinstance(value, Mapping) or not isinstance(value.get("class_path"), str):
        raise InputError(f"{place}: not a class_path with init_args")
    if unknown := set(value) - {"class_path", "init_args", "dict_kwargs"}:
        raise InputError(f"{place}: has {min(map(str, unknown))!r} beside class_path and init_args")
    cls = _known(value["class_path"], kind, place)
    types = argument_types(cls)
    checked: dict[str, Any] = {"class_path": public_path(cls)}
    for group in ("init_args", "dict_kwargs"):
        if arguments := value.get(group):
            if not isinstance(arguments, Mapping):
                raise InputError(f"{place}: its {group} are no mapping")
            checked[group] = {
                _key(name, place): _checked(argument, types.get(name, Any), kind, f"{place}.{name}")
                for name, argument in arguments.items()
            }
    return checked


def checked_part(value: Any, kind: type, place: str) -> Any:
    """Return a component as ``checked_component`` does, or arguments alone, which a later configuration may change.

    Raises:
        InputError: For the reasons of ``checked_component``.
    """
    return checked_component(value, kind, place) if isinstance(value, str) else _checked(value, str, kind, place)


def checked_plain(value: Any, place: str) -> Any:
    """Return numbers, texts, lists and mappings of them as they are.

    Raises:
        InputError: The value is or contains anything else.
    """
    return _checked(value, Any, None, place)


def _known(path: str, kind: type, place: str) -> type:
    try:
        return known_class(path, kind)
    except InputError as error:
        try:
            return known_class(path, Component)
        except InputError:
            raise InputError(f"{place}: {error}") from None


def _key(name: Any, place: str) -> str:
    if not isinstance(name, str) or "." in name:  # jsonargparse reads "encoder.class_path" as two levels
        raise InputError(f"{place}: {name!r} is not a name")
    return name


def _checked(value: Any, hint: Any, kind: type | None, place: str) -> Any:
    if isinstance(value, Mapping):
        if "class_path" not in value:
            return {_key(name, place): _checked(inner, Any, kind, f"{place}.{name}") for name, inner in value.items()}
        if kind is None:
            raise InputError(f"{place}: {value['class_path']} is a class where plain values are expected")
        return checked_component(value, kind, place)
    if isinstance(value, (list, tuple)):
        return [_checked(inner, hint, kind, place) for inner in value]
    if isinstance(value, str):
        return _checked_text(value, hint, kind, place)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise InputError(f"{place}: {type(value).__name__} where plain values are expected")


_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_PLAIN = (str, int, float, bool, complex, bytes, list, dict, tuple, set, frozenset, Path, type(None), type(Ellipsis))


def _checked_text(text: str, hint: Any, kind: type | None, place: str) -> Any:
    try:
        inside = load_yaml(text)
    except yaml.YAMLError:
        inside = None  # a text that is no YAML stays one
    if isinstance(inside, (Mapping, list)) and _names_class(inside):
        raise InputError(f"{place}: holds a class_path in a text")
    leaves = set(_leaves(hint))
    if all(leaf is Any or leaf in _PLAIN or not isinstance(leaf, type) for leaf in leaves):
        return text
    if isinstance(inside, (bool, int, float)) or (str in leaves and not _DOTTED.fullmatch(text)):
        return text
    if kind is None:
        raise InputError(f"{place}: {text} names code where plain values are expected")
    return checked_component(text, kind, place)


def _names_class(value: Any) -> bool:
    if isinstance(value, str):
        return "class_path" in value
    if isinstance(value, Mapping):
        return "class_path" in value or any(map(_names_class, value.values()))
    return isinstance(value, list) and any(map(_names_class, value))


def argument_types(cls: type) -> dict[str, Any]:
    """Return the types of a constructor's arguments; ``str | type`` for all where they cannot be read."""
    try:
        return get_type_hints(cls.__init__)  # type: ignore[misc]
    except (NameError, TypeError, AttributeError):  # a name that only a type checker imports
        return dict.fromkeys(inspect.signature(cls).parameters, str | type)


def _leaves(hint: Any) -> Iterator[Any]:
    """Yield the types inside a type; ``type`` stands for anything that is called or imported by its name."""
    origin = get_origin(hint)
    if origin is Literal:
        yield str
    elif origin in (collections.abc.Callable, type):
        yield type
    elif get_args(hint):
        for inner in get_args(hint):
            yield from _leaves(inner)
    else:
        yield type if hint is collections.abc.Callable else hint
