"""The command ``completion``: scripts that complete command lines in a shell."""

from __future__ import annotations

import argparse
import importlib
import re
from typing import Literal

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
    parsers = []
    for name, description in TRAINING.items():  # the options of the short help: all of them take seconds of imports
        parsers.append(commands.add_parser(name, help=description))
        for option, metavar in re.findall(r"^  (--[a-z][\w.]+) +([A-Z]*)", training_help(name), re.MULTILINE):
            parsers[-1].add_argument(option, metavar=metavar or None)
    for name, description in COMMANDS.items():
        found = getattr(importlib.import_module(f"captioning.cli.{name}"), name)
        inside = commands.add_parser(name, help=description).add_subparsers() if isinstance(found, dict) else commands
        for word, function in found.items() if isinstance(found, dict) else [(name, found)]:
            parent = parser_of(function, word)
            parsers.append(inside.add_parser(word, help=description, parents=[parent], add_help=False))
    for action in (action for parser in parsers for action in parser._actions):
        if action.metavar in ("PATH", "MODEL", "IMAGES", "RUNS", "FILE", "DIR"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(whole, shell))
