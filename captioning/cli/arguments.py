"""The argument parsers of subcommands and scripts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from captioning.cli.outputs import STDOUT, OutputFile, refuse_outputs
from captioning.errors import DEBUG, printable


def script_parser(doc: str | None, command: str = "") -> argparse.ArgumentParser:
    """Return a parser whose help is a module's docstring: what it does, then the options, then its ``examples:``.

    Options cannot be abbreviated, so that a new option never changes what a command line means.

    Args:
        doc: The docstring.
        command: The subcommand of ``captioning``. Empty for a script, which goes by its file's name.
    """
    description, _, examples = (doc or "").partition("\n\nexamples:")
    parser = _Parser(
        prog=f"captioning {command}" if command else None,
        description=description,
        epilog=f"examples:{examples}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(DEBUG, action="store_true", help="show the traceback of an error")
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with one line instead of the list of all options."""
        self.exit(2, f"error: {printable(message)}; {self.prog} --help lists the options\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and check every output before work starts."""
        words = sys.argv[1:] if args is None else list(args)
        options, others = super().parse_known_args(words, namespace)
        outputs = [
            (action.option_strings[0], path, action.type.kind)
            for action in self._actions
            if isinstance(action.type, OutputFile) and (path := getattr(options, action.dest)) not in (None, STDOUT)
        ]
        refuse_outputs(outputs, words)
        return options, others


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return the type of an option that takes a whole number of at least ``low``, and at most ``high``."""
    allowed = f"of at least {low}" if high is None else f"in {low} .. {high}"

    def number(text: str) -> int:
        within = text.isdecimal() and len(text) <= 20 and low <= int(text) and (high is None or int(text) <= high)
        if not within:
            raise argparse.ArgumentTypeError(f"must be a whole number {allowed}, got {text[:40]!r}")
        return int(text)

    return number


def add_import_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import a module of your own whose classes a checkpoint or config names; looked for in this folder first",
    )


def config_parser(
    doc: str | None, command: str, *, output: str, kind: Callable[[str], Path] = Path
) -> argparse.ArgumentParser:
    """Return the parser of a subcommand that builds parts of training configurations and writes one file or folder.

    Options that it does not know are those of the training command: pass them from ``parse_known_args`` to
    ``cli.build.build_parts``.

    Args:
        doc: As for ``script_parser``.
        command: As for ``script_parser``.
        output: Help of ``--output``.
        kind: Type of ``--output``: an ``OutputFile``, or a path for a folder.
    """
    parser = script_parser(doc, command)
    parser.add_argument(
        "--config", action="append", type=Path, default=[], help="training YAML; later files override earlier ones"
    )
    parser.add_argument("--output", type=kind, required=True, help=output)
    add_import_option(parser)
    return parser
