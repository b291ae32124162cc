"""The parser of the command line: errors are one line, and ``--PLACE.help`` lists the classes that a place takes."""

from __future__ import annotations

import collections.abc
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NoReturn, get_args, get_origin

import pytorch_lightning as pl
from lightning_fabric.plugins.precision.precision import _PRECISION_INPUT
from pytorch_lightning.cli import LightningArgumentParser

from captioning.component import own_argument_types, public_path, subclasses
from captioning.errors import InputError, did_you_mean
from captioning.objective import Likelihood
from captioning.training.datamodule import CaptionDataModule
from captioning.training.module import CaptioningModule

_ROOTS: dict[str, type[Any]] = {"model": CaptioningModule, "data": CaptionDataModule, "trainer": pl.Trainer}
_SHOWN = 12  # names in a message


class AutoPrecisionTrainer(pl.Trainer):
    """Lightning's trainer with the precision ``auto``, which ``settled_precision`` replaces before it is built."""

    def __init__(
        self, *args: Any, precision: Literal["auto"] | _PRECISION_INPUT | None = "auto", **options: Any
    ) -> None:
        super().__init__(*args, precision=precision, **options)  # type: ignore[arg-type] # no longer auto


class CommandLineParser(LightningArgumentParser):
    """Lightning's parser with errors of one line, lists of classes, and no abbreviated options."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.allow_abbrev = False  # usage.values_of looks for whole names

    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Any:  # type: ignore[override]
        if args is not None:
            _print_help_of_a_place(list(args))
            _refuse_checkpoints_as_settings(list(args))
        try:
            return super().parse_args(args, *others, **options)
        except UnicodeDecodeError as error:
            raise InputError("a file of settings is not text; give a YAML file") from error
        except OverflowError as error:
            words = ["", *(args or ())]
            long = [option for option, word in pairwise(words) if len(word) > 308 and not word.startswith("-")]
            place = (*long, "a file of settings or an option")[0]
            raise InputError(f"{place}: has a whole number beyond 1.8e308; give a smaller one") from error

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an InputError that says what is wrong in one line."""
        if getattr(self, "_inner_parser", False):  # parses one class's arguments; the outer parser adds the place
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        options = [option for option in parser._option_string_actions if option.startswith("--")]
        raise InputError(explain(message, options)) from ex


def _refuse_checkpoints_as_settings(words: list[str]) -> None:
    """Refuse a checkpoint after an option that takes settings, such as --checkpoint, which is a group of options."""
    for option in ("--checkpoint", "--config", "--data", "--last", "--model"):
        for value in values_of(words, option):
            if value.endswith(".ckpt"):
                raise InputError(f"{option} {value}: takes settings; a checkpoint is given by --ckpt_path {value}")


# The classes that a place takes


def kinds_at(place: str) -> list[type[Any]]:
    """Return the types that the argument at a place such as "model.decoder.attention" takes; [] for no such place."""
    names = [name for name in place.split(".") if name != "init_args"]
    kinds = [_ROOTS[names[0]]] if names[0] in _ROOTS else []
    for name in names[1:]:
        known = [own_argument_types(cls) or {} for kind in kinds for cls in subclasses(kind)]
        hints = [types[name] for types in known if name in types]
        kinds = list(dict.fromkeys(kind for hint in hints for kind in _classes(hint)))
    return kinds


def classes_at(place: str) -> dict[str, type[Any]]:
    """Return the classes that can stand at a place, by their names, those of this package first.

    Base classes are left out, and so are classes of this package that no folder's ``__init__`` exports.
    """
    kinds = kinds_at(place)
    candidates = {cls for kind in kinds for cls in subclasses(kind) if cls not in kinds or not kind.__subclasses__()}
    usable = [cls for cls in candidates if not inspect.isabstract(cls) and not cls.__name__.startswith("_")]
    ours = {cls: public_path(cls).split(".") for cls in usable if cls.__module__.startswith("captioning.")}
    usable = [cls for cls in usable if len(ours.get(cls, ())) <= 3]
    return {cls.__name__: cls for cls in sorted(usable, key=lambda cls: (cls not in ours, cls.__name__))}


def _classes(hint: Any) -> Iterator[type[Any]]:
    """Yield the classes that a type admits, or that a function of this type returns, without builtin ones."""
    if get_origin(hint) is collections.abc.Callable:
        yield from _classes(get_args(hint)[-1])
    elif get_args(hint):
        for inner in get_args(hint):
            yield from _classes(inner)
    elif inspect.isclass(hint) and hint.__module__ != "builtins":
        yield hint


def _print_help_of_a_place(args: list[str]) -> None:
    """Answer ``--PLACE.help [CLASS]`` with every class that can stand there, or with the options of one, and exit."""
    for number, arg in enumerate(args):
        option, _, name = arg.partition("=")
        if not (option.startswith("--") and option.endswith(".help")):
            continue
        place = option[2:].removesuffix(".help")
        classes = classes_at(place)
        if not classes:
            raise InputError(f"{option}: no class stands there; such as --data.source.help, --model.encoder.help")
        following = args[number + 1] if number + 1 < len(args) else ""
        name = name or ("" if following.startswith("-") else following)
        if not name and len(classes) == 1:
            (name,) = classes
        print(_options_text(place, name, classes) if name else _classes_text(place, classes))
        sys.exit(0)


def _classes_text(place: str, classes: dict[str, type]) -> str:
    width = max(map(len, classes))
    lines = [f"  {name:<{width}}  {(inspect.getdoc(cls) or '').partition(chr(10))[0]}" for name, cls in classes.items()]
    example = f"the options of one: --{place}.help {next(iter(classes))}"
    return "\n".join([f"--{place} CLASS, one of:", *lines, "", example])


def _options_text(place: str, name: str, classes: dict[str, type]) -> str:
    cls = classes.get(name.rpartition(".")[2])
    if cls is None:
        raise InputError(f"--{place}.help {name}: no such class{_near(name, list(classes))}")
    parser = LightningArgumentParser(prog="captioning", usage=f"--{place} {name}", description="", add_help=False)
    supplied = {"optimizer", "params", "total_steps"}  # what training hands to an optimizer or a schedule
    parser.add_class_arguments(cls, place, skip=supplied, fail_untyped=False)
    return parser.format_help().rstrip()


# Errors in one line


def explain(message: str, options: Sequence[str]) -> str:
    """Return jsonargparse's message in one line, with what was probably meant.

    Args:
        options: Options of the command, ``--data.batch_size`` and so on.
    """
    if match := re.match(r"unrecognized arguments: (.*)", message, re.DOTALL):
        words = match[1].split() or ['""']
        option = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
        nested = [f"--model.objective.{name}" for name in _arguments(Likelihood)]
        return f"{option}: no such option{did_you_mean(option, [*options, *nested])}"
    if match := re.search(r"does not accept option '(.+?)'", message):
        return _no_such_setting(match[1], [option[2:] for option in options])
    if match := re.match(r"the following arguments are required: (.*)", message):
        missing = ", ".join(name.partition(".")[2] or name for name in match[1].split(", "))
        return f"no {missing} given; give a configuration, such as --config configs/shapes_soft.yaml"
    if match := re.match(r"argument (\S+): expected (?:one|at least one) argument", message):
        return f"{match[1]}: needs a value"
    if message.startswith('Parser key "'):
        return _wrong_value(message)
    return _one_line(message)


def _no_such_setting(place: str, settings: list[str]) -> str:
    sections = sorted({name.partition(".")[0] for name in settings})
    head = place.partition(".")[0]
    if head not in sections:
        return f"{head}: no such section of a configuration{_near(head, sections)}"
    return f"{place}: no such setting{did_you_mean(place, settings)}"


# The cause in a message of nested parsers. Of several alternatives, the first one is reported.
_CAUSE = re.compile(
    r"Option '(?P<option>\w+)' is not accepted"
    r"|the following arguments are required: (?P<required>.+)"
    r"|has no attribute '(?P<missing>\w+)'"
    r"|Expected a dot import path string: (?P<unknown>\S+)"
    r"|Expected an? (?P<type>[^\n]+)\. Got value: (?P<value>.+)"
    r"|Given value: (?P<given>.+)"
)
_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "NoneType": "null"}


def _wrong_value(message: str) -> str:
    cause = _CAUSE.search(message)
    if cause is None:
        return _one_line(message.replace('Parser key "', "", 1).replace('":', ":", 1))
    before = message[: cause.start()]
    place = ".".join(re.findall(r'Parser key "([^"]+)"', before))
    paths = re.findall(r"class_path '?([\w.]+)", before) or re.findall(r"class_path='([\w.]+)'", message)
    if cause["option"] or cause["required"]:
        name = paths[-1].rpartition(".")[2] if paths else ""
        if cause["required"]:
            return f"{place}: {name} needs {cause['required']}; give --{place}.{cause['required'].split(', ')[0]}"
        cls = classes_at(place).get(name)
        taken = [] if cls is None else _arguments(cls)
        return f"{place}: {name or 'its class'} takes no {cause['option']}{_near(cause['option'], taken, 'it takes')}"
    if cause["missing"] or cause["unknown"]:
        name = cause["missing"] or cause["unknown"]
        classes = classes_at(place)
        ours = [name for name, cls in classes.items() if public_path(cls).startswith("captioning.")]
        wanted = did_you_mean(name, list(classes)) or _near(name, ours)
        return f"{place}: {name} is no class that can stand there{wanted or f'; see --{place}.help'}"
    return _of_another_type(place, message, cause)


def _of_another_type(place: str, message: str, cause: re.Match[str]) -> str:
    if cause["type"]:
        types, value = [cause["type"]], cause["value"]
    else:
        types, value = re.findall(r"- Expected an? ([^\n]+)", message), cause["given"]
    choices = [choice.strip("' ") for text in types if "Literal[" in text for choice in text[15:-1].split(",")]
    plain = [_TYPES.get(text[8:-2], text) for text in types if "Literal[" not in text]
    names = [*dict.fromkeys(choices), *plain]
    wanted = f"one of {', '.join(names)}" if choices else " or ".join(names)
    return f"{place}: must be {wanted}, got {value.strip()}{did_you_mean(value.strip(), choices)}"


def _near(word: str, words: Sequence[str], otherwise: str = "one of") -> str:
    """Return which of ``words`` may have been meant by ``word``, or all of them if they are few."""
    if hint := did_you_mean(word, words):
        return hint
    return f"; {otherwise} {', '.join(words)}" if 0 < len(words) <= _SHOWN else ""


def _arguments(cls: type) -> list[str]:
    """Return the names of a class's arguments."""
    return list(inspect.signature(cls.__init__).parameters)[1:]  # type: ignore[misc]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def values_of(args: Sequence[str], *options: str) -> list[str]:
    """Return the values of the options, given as ``--option VALUE`` or ``--option=VALUE``."""
    values = []
    for arg, following in zip(args, [*args[1:], ""], strict=False):
        name, equals, value = arg.partition("=")
        if name in options:
            values.append(value if equals else following)
    return values
