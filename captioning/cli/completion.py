"""Print a script that completes command lines of `captioning` in bash or zsh.

Write it where the shell looks for such scripts, as in the examples, and open a new shell.

examples:
  captioning completion bash > ~/.local/share/bash-completion/completions/captioning
  captioning completion zsh > DIR/_captioning     (a folder of $fpath)
"""

from __future__ import annotations

import argparse
import importlib
import re

import shtab

from captioning.cli.arguments import script_parser
from captioning.cli.usage import COMMANDS, HELP, TOOLS, command_help
from captioning.errors import exits_on_input_error

_OPTION = re.compile(r"^  (--[\w.]+)(?: (\S+))?", re.MULTILINE)
_FILES = re.compile(r"\b(IMAGE|MODEL|RUN|PATH|FILE|PAGE)\b")


def parser() -> argparse.ArgumentParser:
    parser = script_parser(__doc__, "completion")
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell")
    return parser


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    print(shtab.complete(whole_parser(), parser().parse_args(argv).shell))


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser with all subcommands, in which every argument that is a file or a folder says so."""
    whole = argparse.ArgumentParser("captioning", description=HELP)
    subcommands = whole.add_subparsers()
    for name, description in COMMANDS.items():
        _add_listed_options(subcommands.add_parser(name, help=description), command_help(name))
    for name, description in TOOLS.items():
        tool = importlib.import_module(f"captioning.cli.{name}").parser()
        subcommands.add_parser(name, help=description, parents=[tool], add_help=False)
    _mark_files(whole)
    return whole


def _add_listed_options(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the options that the short help of a training command lists; all of them would take seconds of imports."""
    for option, metavar in _OPTION.findall(text):
        if "PLACE" not in option:
            value = {"metavar": metavar} if metavar else {"action": "store_true"}
            parser.add_argument(option, **value)


def _mark_files(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                _mark_files(subparser)
        elif "DIR" in (shown := str(action.metavar)):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif _FILES.search(shown):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
