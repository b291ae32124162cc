"""The ``captioning`` command. Help is printed here, because the imports of training take seconds."""

import importlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from captioning import __version__
from captioning.cli import FIT_HELP, HELP, IMPORTED_MODULES, OTHER_COMMANDS, RUN_COMMANDS, announce
from captioning.cli.parser import CommandParser, run_command
from captioning.errors import InputError, did_you_mean, exits_on_input_error
from captioning.settings import command_line


@exits_on_input_error
def main(args: Sequence[str] | None = None) -> None:
    """Run the command that a command line names. ``args`` are the words after ``captioning``, by default sys.argv's."""
    if not os.access(os.path.expanduser("~"), os.W_OK):  # as under docker run --user
        # Libraries keep compiled kernels and other files in the home folder.
        os.environ["HOME"] = os.path.join(tempfile.gettempdir(), f"home-{os.getuid()}")
        os.makedirs(os.environ["HOME"], mode=0o700, exist_ok=True)
    name, *words = command_line(args) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(HELP)
    elif name == "--version":
        print(f"captioning {__version__}")
    elif name == "fit" and {"-h", "--help"} & set(words):
        print(FIT_HELP)
    elif name in RUN_COMMANDS or name in OTHER_COMMANDS:
        _run(name, words)
    else:
        hint = did_you_mean(name, [*RUN_COMMANDS, *OTHER_COMMANDS]) or "; `captioning` lists the commands"
        raise InputError(f"captioning {name}: no such command{hint}")


def _run(name: str, words: list[str]) -> None:
    parser = CommandParser(f"captioning {name}", add_help=False, allow_abbrev=False)
    parser.add_argument("--import", dest="imports", metavar="MODULE", action="append", default=[])
    options, words = parser.parse_known_args(words)
    if options.imports:  # a module may lie beside the configuration that names its classes
        files = [word.rpartition("=")[2] for word in words if word.endswith((".yaml", ".yml"))]
        sys.path[:0] = [os.getcwd(), *(str(Path(file).resolve().parent) for file in files)]
    IMPORTED_MODULES[:] = options.imports
    try:
        for module in options.imports:
            importlib.import_module(module)
    except Exception as error:  # a user's module may fail in any way
        hint = f"; give {module[:-3]}, without .py" if module.endswith(".py") else ""
        raise InputError(f"--import {module}: {type(error).__name__}: {error}{hint}") from error
    if name == "fit":
        announce("captioning fit")
        from captioning.cli.fit import fit

        fit(["--help" if word == "--help_all" else word for word in words])
    elif name in RUN_COMMANDS:
        from captioning.cli.score import score

        run_command(f"captioning {name}", score, words, task=name)
    else:
        run_command(f"captioning {name}", getattr(importlib.import_module(f"captioning.cli.{name}"), name), words)


if __name__ == "__main__":
    main()
