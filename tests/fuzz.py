#!/usr/bin/env python
"""Damage files, states, settings, environments and command lines at random; each must be used or refused in one line.

Annotations, captions, features, results of runs, checkpoints, the state of training in them, exported folders, ONNX
graphs, images, configs, variables of the environment and command lines are damaged and read in a process of their own.
What ends in another error than an InputError, computes for more than ten seconds, waits for more than a minute, asks
for more than 4 GB, or ends the process, is a fault: it is printed with the command that makes it again. Case N depends
on the seed, its target and N alone. Ctrl-C prints how to go on. Exit code 1 if there was a fault.

examples:
  python tests/fuzz.py --seconds 60
  python tests/fuzz.py --seed 2 --cases 1000000 --json fuzz.json
  python tests/fuzz.py --seed 2 --only checkpoints --first 1234 --cases 1
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import mmap
import os
import random
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from fuzz_states import STATES
from fuzz_targets import FILES, Target
from fuzz_tools import TOOLS
from helpers_fuzz import damage

from captioning.data import ShapesSource
from captioning.errors import InputError
from captioning.files import write_json
from captioning.progress import Progress
from captioning.provenance import provenance

TARGETS = {function.__name__: function for function in (*FILES, *STATES, *TOOLS)}
SECONDS_EACH = 10
WAITED = 6  # times as long may be waited, on a machine that may have other work
MEMORY = 4 << 30  # bytes beyond what the process has when it begins
FEW_IMAGES = 200  # are generated in an input's time
COUNTS = ("inputs", "refused", "faults", "milliseconds")
_PLACES = 1000  # of the order in which targets take turns


class TookTooLong(BaseException):
    """No Exception, so that no reader takes it for an error of its own."""


class Board:
    """Counts of every target in memory that a worker shares with its parent, so that they outlive the worker.

    Attributes:
        tallies: COUNTS of every target.
    """

    def __init__(self, names: list[str], first: int) -> None:
        memory = mmap.mmap(-1, 8 * (2 + len(COUNTS) * len(names)))
        numbers = np.frombuffer(memory, np.int64)
        self._now, counts = numbers[:2], numbers[2:].reshape(len(names), len(COUNTS))
        self.tallies = dict(zip(names, counts, strict=True))
        self.begin(first)

    def begin(self, case: int) -> None:
        self._now[:] = case, time.monotonic()

    @property
    def case(self) -> int:
        """The case that is being run."""
        return int(self._now[0])

    @property
    def seconds(self) -> float:
        """How long it has been run."""
        return time.monotonic() - float(self._now[1])

    def add(self, name: str, **counts: int) -> None:
        for what, count in counts.items():
            self.tallies[name][COUNTS.index(what)] += count

    def total(self, what: str) -> int:
        return int(sum(tally[COUNTS.index(what)] for tally in self.tallies.values()))


def turns(targets: dict[str, Target]) -> list[str]:
    """Return the order in which targets take turns, each as often as its share says."""
    total = sum(target.share for target in targets.values())
    names = [name for name, target in targets.items() for _ in range(max(1, round(_PLACES * target.share / total)))]
    random.Random(0).shuffle(names)
    return names


def set_timers(seconds: float) -> None:
    """End what computes for so long, or waits for ``WAITED`` times as long."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WAITED * seconds)


def prepare(target: Target, folder: Path) -> None:
    """Write the files of a target as they should be."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in target.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def attempt(target: Target, folder: Path, draw: random.Random) -> str:
    """Run one input and return "used" or "refused".

    Raises:
        BaseException: a fault.
    """
    name = draw.choice(target.damaged) if target.damaged else None
    if target.leaves_traces:
        prepare(target, folder)
        os.chdir(folder)  # which is a new one
    if name is not None:
        (folder / name).write_bytes(damage(name, target.files[name], draw))
    set_timers(SECONDS_EACH)
    try:
        target.run(folder, draw)
    except InputError:
        return "refused"
    except SystemExit as ended:
        if ended.code == 130:
            raise KeyboardInterrupt from None
        if ended.code not in (0, 2, None):
            raise RuntimeError(f"exit code {ended.code}") from ended
        return "refused" if ended.code else "used"
    else:
        return "used"
    finally:
        set_timers(0)
        if name is not None and not target.leaves_traces:
            (folder / name).write_bytes(target.files[name])


def report(name: str, number: int, seed: int, error: BaseException, seen: set[str]) -> None:
    """Print a fault, the first time that it shows at its place."""
    frames = traceback.extract_tb(error.__traceback__)
    last = ([frame for frame in frames if "/captioning/" in frame.filename] or frames)[-1]
    place = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
    if place in seen:
        return
    seen.add(place)
    say_fault(name, number, seed, f"{place}: {' '.join(str(error).split())[:300]}")
    if "--traceback" in sys.argv:
        traceback.print_exception(error, file=sys.__stdout__)


def say_fault(name: str, number: int, seed: int, what: str) -> None:
    print(f"FAULT {name}: {what}", file=sys.__stdout__)
    command = f"python tests/fuzz.py --seed {seed} --only {name} --first {number} --cases 1"
    print(f"  {command}", file=sys.__stdout__, flush=True)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        yield


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Let no input take more time or memory than it may."""

    def too_long(number: int, frame: Any) -> None:
        raise TookTooLong(f"more than {SECONDS_EACH} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, too_long)
    generate = ShapesSource._generate

    def generate_few(source: ShapesSource, part: Path) -> None:
        if sum(source.images.values()) > FEW_IMAGES:  # the default, where a damaged config leaves the number out
            raise InputError(f"more than {FEW_IMAGES} images")
        generate(source, part)

    with warnings.catch_warnings(), silence(), mock.patch.object(ShapesSource, "_generate", generate_few):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        yield


def work(targets: dict[str, Target], order: list[str], board: Board, last: int, seed: int, folder: Path) -> None:
    """Run the cases from the board's to ``last``, and count them on the board."""
    seen: set[str] = set()
    for case in range(board.case, last):
        name = order[case % len(order)]
        board.begin(case)
        begun = time.monotonic()
        os.chdir(folder / name)
        try:
            used = attempt(targets[name], folder / name, random.Random(f"{seed}/{name}/{case}"))
            board.add(name, inputs=1, refused=int(used == "refused"))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            board.add(name, inputs=1, faults=1)
            report(name, case, seed, error, seen)
        os.chdir(folder)
        board.add(name, milliseconds=round(1000 * (time.monotonic() - begun)))
    board.begin(last)


def start(*work_of: Any) -> int:
    """Fork a worker and return its process id."""
    sys.stdout.flush()
    if process := os.fork():
        return process
    with contextlib.suppress(KeyboardInterrupt), bounded():
        work(*work_of)
    os._exit(0)


def fuzz(
    targets: dict[str, Target], *, seed: int, cases: int, seconds: float = 1e9, first: int = 0, folder: Path
) -> Board:
    """Run cases first .. first + cases - 1, in the order of ``turns``, until time is up or Ctrl-C is pressed."""
    until, order, board = time.monotonic() + seconds, turns(targets), Board(list(targets), first)
    with silence():
        for name, target in targets.items():
            prepare(target, folder / name)
            os.chdir(folder / name)
            if target.damaged and not target.leaves_traces:
                target.run(folder / name, random.Random(seed))  # as they are, the files are used
    with Progress("cases", first + cases, first, unit="cases", stream=sys.stderr) as progress:
        while board.case < first + cases and time.monotonic() < until:
            worker = start(targets, order, board, first + cases, seed, folder)
            ended = False
            try:
                while not ended and time.monotonic() < until and board.seconds < (WAITED + 3) * SECONDS_EACH:
                    time.sleep(0.05)
                    ended, status = os.waitpid(worker, os.WNOHANG)
                    progress.update(board.case)
            except KeyboardInterrupt:
                until = 0.0
            if not ended:
                os.kill(worker, signal.SIGKILL)
                _, status = os.waitpid(worker, 0)
            if status and time.monotonic() < until:
                name = order[board.case % len(order)]
                how = f"died with signal {os.WTERMSIG(status)}" if ended else "hung beyond all timers"
                say_fault(name, board.case, seed, how)
                board.add(name, inputs=1, faults=1)
                board.begin(board.case + 1)
    return board


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--cases", type=int, default=1_000_000, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1e9, help="time limit (default: none)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=TARGETS, help="targets (default: all)")
    parser.add_argument("--traceback", action="store_true", help="show where faults come from")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts and where they come from")
    args = parser.parse_args()
    faulthandler.enable()
    os.environ["CAPTIONING_JAVA"] = "off"  # it takes seconds to start, and more memory than a case has
    torch.set_num_threads(1)
    output = args.json.resolve() if args.json else None
    home, memory_disk = os.getcwd(), Path("/dev/shm")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=memory_disk if memory_disk.is_dir() else None) as name:
        with silence():
            targets = {target: TARGETS[target](Path(name) / "made" / target) for target in args.only or TARGETS}
        options = {"seed": args.seed, "cases": args.cases, "first": args.first, "folder": Path(name)}
        board = fuzz(targets, seconds=args.seconds, **options)
        os.chdir(home)
    seconds = time.monotonic() - begun
    for target, (inputs, refused, faults, milliseconds) in board.tallies.items():
        each = milliseconds / max(1, inputs)
        print(f"{target:14} {inputs:9,} cases, {refused:9,} refused, {faults} faults, {each:.1f} ms each")
    total, faults = board.total("inputs"), board.total("faults")
    print(f"{total:,} cases in {seconds:.0f} s, {faults} faults")
    if board.case < args.first + args.cases:
        print(f"to go on: --first {board.case} --cases {args.first + args.cases - board.case}")
    if output is not None:
        content: dict[str, Any] = {
            "value": total,
            "unit": "damaged inputs, each used or refused in one line",
            "faults": faults,
            "targets": {
                name: dict(zip(COUNTS[:3], map(int, tally), strict=False)) for name, tally in board.tallies.items()
            },
            "seconds": round(seconds),
        }
        command = f"python tests/fuzz.py {shlex.join(sys.argv[1:])}"
        write_json(output, content | provenance(command=command, seed=args.seed))
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
