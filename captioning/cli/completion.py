"""The command ``completion``: scripts that complete command lines in a shell."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Mapping
from typing import Any, Literal

import shtab

from captioning.cli import COMMANDS, TRAINING, training_help
from captioning.cli.parser import parser_of


def completion(shell: Literal["bash", "zsh"]) -> None:
    """Print a script that completes command lines of `captioning` in bash or zsh.

    Write it where the shell looks for such scripts, as in the examples, and open a new shell.

    Args:
        shell: The shell.

    Examples:
        captioning completion bash > ~/.local/share/bash-completion/completions/captioning
        captioning completion zsh > DIR/_captioning     (a folder of $fpath)
    """
    whole = argparse.ArgumentParser("captioning")
    commands = whole.add_subparsers()
    for name, description in TRAINING.items():  # the options of the short help: all of them take seconds of imports
        parser = commands.add_parser(name, help=description)
        for option, metavar in re.findall(r"^  (--[a-z][\w.]+) +([A-Z]*)", training_help(name), re.MULTILINE):
            _complete_files(parser.add_argument(option, metavar=metavar or None))
    for name, description in COMMANDS.items():
        function = getattr(importlib.import_module(f"captioning.cli.{name}"), name)
        _add(commands, name, description, function)
    print(shtab.complete(whole, shell))


def _add(commands: Any, name: str, description: str, function: Any) -> None:
    if isinstance(function, Mapping):
        inner = commands.add_parser(name, help=description).add_subparsers()
        for word, each in function.items():
            _add(inner, word, "", each)
        return
    parser = commands.add_parser(name, help=description, parents=[parser_of(function, name)], add_help=False)
    for action in parser._actions:
        _complete_files(action)


def _complete_files(action: argparse.Action) -> None:
    if action.metavar in ("PATH", "MODEL", "IMAGES", "RUNS", "FILE", "DIR"):
        action.complete = shtab.FILE  # type: ignore[attr-defined]
