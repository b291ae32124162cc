"""The argument parsers of subcommands and scripts."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from captioning.cli.outputs import STDOUT, OutputFile, refuse_outputs
from captioning.cli.usage import refuse_empty_values
from captioning.errors import DEBUG, printable
from captioning.files import write_json

Group = argparse.ArgumentParser | argparse._ArgumentGroup


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
        formatter_class=_Help,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)  # who reads it knows it
    parser.add_argument(DEBUG, action="store_true", help="show the traceback of an error")
    return parser


class _Help(argparse.RawDescriptionHelpFormatter):
    """At most 100 columns, one line for an option where that fits, and a usage of one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=29, width=min(100, shutil.get_terminal_size().columns))

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        shown = [action for action in actions if action.required or not action.option_strings]
        line = usage or f"{self._format_usage(None, shown, [], '').strip()} [options]"
        super().add_usage(line, actions, groups, prefix)


class _Parser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._positionals = self._optionals  # one list, without a heading for one line

    def error(self, message: str) -> NoReturn:
        """Exit with one line instead of the list of all options."""
        self.exit(2, f"error: {printable(message)}; {self.prog} --help lists the options\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and check that no value is empty, and every output, before work starts."""
        words = sys.argv[1:] if args is None else list(args)
        refuse_empty_values(words)
        options, others = super().parse_known_args(words, namespace)
        outputs = [
            (action.option_strings[0], path, action.type.kind)
            for action in self._actions
            if isinstance(action.type, OutputFile) and (path := getattr(options, action.dest)) not in (None, STDOUT)
        ]
        refuse_outputs(outputs, words)
        return options, others


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return the type of an option that takes a whole number of at least ``low``, and at most ``high`` or 2^31 - 1."""
    largest = 2**31 - 1 if high is None else high

    def number(text: str) -> int:
        too_large = text.isdecimal() and (len(text) > 20 or int(text) > largest)
        allowed = f"in {low} .. {largest}" if too_large or high is not None else f"of at least {low}"
        if too_large or not (text.isdecimal() and low <= int(text)):
            raise argparse.ArgumentTypeError(f"must be a whole number {allowed}, got {text[:40]!r}")
        return int(text)

    return number


def add_model_option(parser: Group, *, several: str = "", required: bool = True, default: str | None = None) -> None:
    """Add ``--model``, which names a trained model that is used: ``model``, or the list ``models`` if several may be.

    Args:
        parser: The parser, or a group of it.
        several: What several models are, such as "an ensemble". Empty: the command takes one.
        required: Whether the command needs a model that has no default.
        default: The model that is used where none is named.
    """
    parser.add_argument(
        "--model",
        dest="models" if several else "model",
        required=required and default is None,
        default=default,
        action="append" if several else "store",
        metavar="MODEL",
        help=f"a FILE.ckpt, exported folder, hf:owner/name or pretrained{several and f'; repeat: {several}'}",
    )


def add_json_option(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--json``. Its value is ``STDOUT`` for standard output, where nothing else is printed then."""
    parser.add_argument(
        "--json",
        nargs="?",
        const=str(STDOUT),
        type=OutputFile("JSON"),
        metavar="FILE",
        help=f"also write {what} as JSON; without FILE, print only JSON",
    )


@contextlib.contextmanager
def text_beside(target: Path | None) -> Iterator[None]:
    """Print to standard error inside the block if ``--json`` sends JSON alone to standard output."""
    with contextlib.redirect_stdout(sys.stderr) if target == STDOUT else contextlib.nullcontext():
        yield


def write_result(target: Path | None, content: Any) -> None:
    """Write what ``--json`` asks for: a file, or with ``STDOUT`` standard output."""
    if target == STDOUT:
        print(json.dumps(content, ensure_ascii=False, indent=1))
    elif target is not None:
        write_json(target, content)


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N (default: auto)")


def device_name(device: str) -> str:
    """Return the value of ``--device``, with ``auto`` replaced by the device that is there."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def add_batch_size_option(parser: argparse.ArgumentParser, size: int) -> None:
    parser.add_argument(
        "--batch_size", type=whole_number(1), default=size, metavar="N", help=f"images per batch (default: {size})"
    )


def add_split_option(parser: argparse.ArgumentParser, *splits: str) -> None:
    """Add ``--split``. With several defaults it takes several splits."""
    parser.add_argument(
        "--split",
        nargs="+" if len(splits) > 1 else None,
        default=list(splits) if len(splits) > 1 else splits[0],
        choices=("train", "val", "test"),
        metavar="SPLIT",
        help=f"train, val or test (default: {' '.join(splits)})",
    )


def add_search_options(decoding: Group) -> None:
    decoding.add_argument(
        "--beam_size", type=whole_number(1), metavar="K", help="partial captions kept at each step; 1 is greedy search"
    )
    decoding.add_argument(
        "--length_normalization", type=float, metavar="A", help="divide a caption's score by its length to the power A"
    )
    decoding.add_argument("--max_length", type=whole_number(1), metavar="N", help="largest number of words")
    decoding.add_argument("--min_length", type=int, metavar="N", help="smallest number of words")


def add_inference_option(parser: Group) -> None:
    parser.add_argument(
        "--inference",
        choices=("expected", "argmax", "sample"),
        metavar="HOW",
        help="how hard attention forms contexts: expected, argmax or sample",
    )


def add_import_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="a Python module of yours whose classes a model or config names",
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
        "--config",
        action="append",
        type=Path,
        default=[],
        metavar="FILE.yaml",
        help="a training configuration; of several, the later ones win",
    )
    parser.add_argument("--output", type=kind, required=True, metavar="PATH", help=output)
    add_import_option(parser)
    return parser
