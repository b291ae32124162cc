"""Settings: reading a configuration file, comparing configurations by dotted keys, and ``~`` on a command line."""

import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from captioning import earlier_names
from captioning.errors import InputError, one_line, warn_once

Split = Literal["train", "val", "test"]

STORAGE_SETTINGS = (
    "name runs config ckpt_path trainer.default_root_dir trainer.logger checkpoint.dirpath last.dirpath"
).split()
"""Settings that say where a run is stored and logged."""

BATCH_SETTINGS = (
    "data.batch_size data.group data.captions_per_image data.limit_images seed_everything "
    "trainer.accumulate_grad_batches processes"
).split()
"""Settings that determine the batches of training. A resumed run cannot change them inside an epoch."""

STATE_SETTINGS = ("model.optimizer", "model.scheduler", "model.encoder.learning_rate")
"""Settings that fix what is in a checkpoint's state. A resumed run cannot change them or settings beneath them."""

SEED_SETTINGS = ("seed_everything", "data.seed")
"""Settings that may hold a run's seed, the newest first. Runs of a variant differ in them alone."""


def read_config(path: Path, option: str = "") -> dict[str, Any]:
    """Return the settings in a YAML file. Raises InputError, which names ``option``, if it is no valid mapping."""
    import yaml

    try:
        settings = yaml_loader()(path.read_text(encoding="utf-8-sig")) or {}
        problem = "" if isinstance(settings, dict) else "not a configuration, which is a mapping of settings"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except InputError as error:
        problem = str(error)
    except (ValueError, yaml.YAMLError) as error:
        problem = f"not a YAML file ({one_line(error, 120)})"
    if problem:
        raise InputError(f"{option} {path}: {problem}".lstrip())
    return settings


@functools.cache
def yaml_loader() -> Callable[[str], Any]:
    """Return the parser of YAML settings. The first call makes jsonargparse use it, and write with ``config_text``.

    The parser follows jsonargparse's rules, by which 1e-3 is a number, and expands ``~``. It raises InputError for a
    key that occurs twice, because PyYAML would silently take the last one.
    """
    import yaml
    from jsonargparse import get_loader, set_dumper, set_loader

    parse = get_loader("yaml")

    def load(text: str) -> Any:
        if repeated := [*_repeated_keys(yaml.compose(text, yaml.SafeLoader), {})]:
            raise InputError("; ".join(repeated))
        settings = _without_removed_options(map_strings(_expand_home, parse(text)))
        for section, name, option in earlier_names.SETTINGS:
            values = settings.get(section) if isinstance(settings, dict) else None
            if isinstance(values, dict) and values.pop(name, None) is not None:
                warn_once(f"{section}.{name} is ignored; it is an option now: captioning test --{option}")
        return settings

    set_loader("yaml", load, (yaml.YAMLError,))
    set_dumper("yaml", config_text)  # jsonargparse writes and reads the arguments of classes while it parses
    return load


def _without_removed_options(value: Any) -> Any:
    """Return settings without options that are gone and have their defaults, so that an earlier run can be resumed."""
    if isinstance(value, list):
        return [_without_removed_options(item) for item in value]
    if not isinstance(value, dict):
        return value
    value = {key: _without_removed_options(inner) for key, inner in value.items()}
    if isinstance(init_args := value.get("init_args"), dict):
        removed = earlier_names.REMOVED_OPTIONS.get(str(value.get("class_path")).rpartition(".")[2], {}).items()
        value["init_args"] = {name: inner for name, inner in init_args.items() if (name, inner) not in removed}
    return value


def config_text(settings: Any) -> str:
    """Return settings as YAML, which ``read_config`` reads back unchanged. Strings such as 05879e07 are quoted."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """PyYAML quotes what its own rules read as a number; jsonargparse reads more, such as 1e5."""

    number = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", number, [*"-+0123456789"])
    return str(yaml.dump(settings, Dumper=Dumper, sort_keys=False, allow_unicode=True))


def _repeated_keys(node: Any, lines: dict[str, int], prefix: str = "") -> Iterator[str]:
    """Yield a message for every setting that occurs twice, as a key of its section or as one dotted key.

    ``lines`` has the line of every setting so far, by dotted key.
    """
    children = getattr(node, "value", None)
    for number, child in enumerate(children if isinstance(children, list) else []):
        if not isinstance(child, tuple):  # an item of a list
            yield from _repeated_keys(child, lines, f"{prefix}{number}.")
            continue
        key, line = f"{prefix}{child[0].value}", child[0].start_mark.line + 1
        if key in lines:
            yield f"line {line}: {key} is there twice, first in line {lines[key]}"
        elif child[0].value != "<<":  # several merges lose nothing
            lines[key] = line
            yield from _repeated_keys(child[1], lines, f"{key}.")


def map_strings(function: Callable[[str], str], value: Any) -> Any:
    """Return plain data in which ``function`` has replaced every string."""
    if isinstance(value, dict):
        return {key: map_strings(function, inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(function, inner) for inner in value]
    return function(value) if isinstance(value, str) else value


def _expand_home(word: str) -> str:
    """Return a word with the home folder for ``~``, even in ``--option=~/x``, where no shell expands it."""
    option, sign, path = word.partition("=") if word.startswith("--") else ("", "", word)
    return option + sign + os.path.expanduser(path)


def command_line(args: Sequence[str] | None) -> list[str]:
    """Return the words of a command line, by default sys.argv's, with the home folder for ``~``."""
    return [_expand_home(word) for word in (sys.argv[1:] if args is None else args)]


def nest(settings: Mapping[str, Any], nested: dict[str, Any]) -> dict[str, Any]:
    """Return ``nested`` with further settings. A dotted key becomes nested mappings, as in `captioning fit`."""
    for key, value in settings.items():
        section, _, inner_key = str(key).partition(".")
        inner = {inner_key: value} if inner_key else value
        nested[section] = nest(inner, nested.get(section) or {}) if isinstance(inner, Mapping) else inner
    return nested


def flatten(settings: Mapping[str, Any], without: Iterable[str] = ()) -> dict[str, Any]:
    """Return settings by dotted key, {"model.decoder.dropout": 0.5}, without those in or beneath ``without``.

    Classes of this package, PyTorch and Lightning appear by their short name, other classes by their full path. The key
    of an item of a list is its class; if a class occurs again, its key ends in -2, -3 ..
    """
    left_out = tuple(f"{key}." for key in without)
    return {key: value for key, value in _flatten("", settings) if not f"{key}.".startswith(left_out)}


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and "class_path" in value:
        path = str(value["class_path"])
        is_known = path.startswith(("captioning.", "torch.", "pytorch_lightning."))
        yield prefix, _class_name(path) if is_known else path
        arguments = value.get("init_args") or {}
        yield from _flatten(prefix, arguments) if arguments else ()
    elif isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        names = [_class_name(item.get("class_path", number)) for number, item in enumerate(value)]
        for i, (name, item) in enumerate(zip(names, value, strict=True)):
            count = names[:i].count(name) + 1
            yield from _flatten(f"{prefix}.{name}" if count == 1 else f"{prefix}.{name}-{count}", item)
    else:
        yield prefix, value


def _class_name(class_path: Any) -> str:
    return str(class_path).rpartition(".")[2]


def attention_kind(settings: Mapping[str, Any]) -> str:
    """Return one word for the attention of a configuration: soft, hard, summed, multihead ..; "" if it names none."""
    flat_settings = flatten(settings)
    if flat_settings.get("model.decoder.output") == "SummedOutput":
        return "summed"
    return _class_name(flat_settings.get("model.decoder.attention") or "").removesuffix("Attention").lower()
