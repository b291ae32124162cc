"""The ``captioning`` command. Help is answered here, because importing what training needs takes seconds."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from captioning.cli import COMMANDS, HELP, IMPORTED, TRAINING, announce, near, training_help
from captioning.cli.parser import Parser, call
from captioning.errors import InputError, did_you_mean, exits_on_input_error

_FILES = ("--config", "-c", "--ckpt_path", "--model", "--init_from", "--captions", "--references")
_NO_FILES = ("best", "last", "null", "pretrained")


@exits_on_input_error
def main(args: Sequence[str] | None = None) -> None:
    """Run the command that the command line names.

    Args:
        args: The words after ``captioning``; None for those of this process.
    """
    name, *words = (sys.argv[1:] if args is None else args) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(HELP)
    elif name == "--version":
        from captioning import __version__

        print(f"captioning {__version__}")
    elif name in TRAINING and {"-h", "--help"} & set(words):
        print(training_help(name))
    elif name in TRAINING or name in COMMANDS:
        _run(name, words)
    else:
        hint = did_you_mean(name, [*TRAINING, *COMMANDS]) or "; `captioning` lists the commands"
        raise InputError(f"captioning {name}: no such command{hint}")


def _run(name: str, words: list[str]) -> None:
    parser = Parser(f"captioning {name}", add_help=False, allow_abbrev=False)
    parser.add_argument("--import", dest="imports", metavar="MODULE", action="append", default=[])
    options, words = parser.parse_known_args(words)
    given = [*itertools.pairwise(words), *(word.partition("=")[::2] for word in words if "=" in word)]
    for option, value in given:
        is_path = option in _FILES and value not in _NO_FILES and not value.startswith(("{", "hf:"))
        if is_path and not Path(value).exists():
            raise InputError(f"{option} {value}: no such file{near(value)}")
        if is_path and option in ("--config", "-c"):
            importlib.import_module("captioning.files").read_config(Path(value), option)  # names the file
    if options.imports:
        configs = [Path(value) for option, value in given if option == "--config"]
        sys.path[:0] = [str(folder.resolve()) for folder in (Path(), *(config.parent for config in configs))]
    IMPORTED[:] = options.imports
    for module in options.imports:
        _import(module)
    if name in TRAINING:
        announce(name, "PyTorch and Lightning")
        words = ["--help" if word == "--help_all" else word for word in words]
        importlib.import_module("captioning.cli.lightning").run(name, words)
    else:
        call(f"captioning {name}", getattr(importlib.import_module(f"captioning.cli.{name}"), name), words)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a user's module may fail in any way
        hint = f"; give {module[:-3]}, without .py" if module.endswith(".py") else ""
        raise InputError(f"--import {module}: {type(error).__name__}: {error}{hint}") from error


if __name__ == "__main__":
    main()
