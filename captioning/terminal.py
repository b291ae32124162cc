"""What scripts share on a terminal: the argument parser and a progress display."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

from captioning.errors import DEBUG, printable

_SECONDS_BETWEEN_LINES = 15.0


def script_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a script's docstring: what it does, then the options, then its ``examples:``.

    Options cannot be abbreviated, so that adding one never changes what a command line means.
    """
    description, _, examples = (doc or "").partition("\n\nexamples:")
    parser = _Parser(
        description=description,
        epilog=f"examples:{examples}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(DEBUG, action="store_true", help="show the traceback of an error")
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with one line, without the list of all options."""
        self.exit(2, f"error: {printable(message)}; {self.prog} --help lists the options\n")


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


def config_parser(doc: str | None, *, output: str) -> argparse.ArgumentParser:
    """Return a parser of a script that works on parts of training configurations and writes one file or folder.

    What it does not know are options of the training command: ``parse_known_args``, then ``configs.build_parts``.

    Args:
        output: help of ``--output``.
    """
    parser = script_parser(doc)
    parser.add_argument(
        "--config", action="append", type=Path, default=[], help="training YAML; later files override earlier ones"
    )
    parser.add_argument("--output", type=Path, required=True, help=output)
    add_import_option(parser)
    return parser


class Progress:
    """Progress of a long task: a bar on a terminal, occasional lines in a log. A context manager.

    Args:
        label: names the task.
        total: units of the whole task; None if unknown.
        done: units that were done before; they do not count in the rate.
        unit: what is counted; "bytes" are shown as MB and GB.
        stream: where to show it; standard output by default.
        shown: False shows only the lines of ``say``.
    """

    def __init__(
        self,
        label: str,
        total: int | None = None,
        done: int = 0,
        *,
        unit: str = "images",
        stream: TextIO | None = None,
        shown: bool = True,
    ) -> None:
        self.label, self.total, self.first, self.done, self.unit = label, total, done, done, unit
        self.stream, self.shown = stream or sys.stdout, shown
        self._started = self._printed = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self.shown and self.stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[count]}"),
                TimeElapsedColumn() if self.total is None else TimeRemainingColumn(),
                console=Console(file=self.stream),
                redirect_stdout=self.stream is sys.stdout,  # else it leads to a file or another program
            )
            self._task = self._bar.add_task(self.label, total=self.total, completed=self.done, count=self._count())
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int) -> None:
        """Show that ``done`` units of the whole are done."""
        self.done = done
        if self._bar is not None:
            self._bar.update(self._task, completed=done, count=self._count())
        elif self.shown and time.monotonic() - self._printed > _SECONDS_BETWEEN_LINES:
            self._printed = time.monotonic()
            self.say(f"{self.label}: {self._count()}")

    def say(self, line: str) -> None:
        """Print a line of its own."""
        line = printable(line)
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=self.stream, flush=True)

    def rate(self) -> str:
        """Return such as "12.3 images/s"."""
        speed = (self.done - self.first) / max(1e-9, time.monotonic() - self._started)
        return f"{speed:.1f} {self.unit}/s" if self.unit != "bytes" else f"{size_text(speed)}/s"

    def _count(self) -> str:
        known = [self.done] if self.total is None else [self.done, self.total]
        if self.unit == "bytes":
            return f"{' of '.join(map(size_text, known))}, {self.rate()}"
        return f"{' of '.join(f'{value:,}' for value in known)} {self.unit}, {self.rate()}"


def size_text(count: float) -> str:
    """Return a number of bytes as MB or GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
