#!/usr/bin/env python
"""Damage files and command lines at random, and see that every one is used or refused in one line.

Annotations, captions, features, results of runs, checkpoints, exported folders, images, configs and command lines are
damaged and read in this process. What ends in another error than an InputError, computes for more than ten seconds, or
asks for more than 4 GB, is a fault: it is printed with the command that makes it again. Input N of a target depends on
the seed, the target and N alone. Exit code 1 if there was a fault.

examples:
  python tests/fuzz.py --seconds 60
  python tests/fuzz.py --seed 2 --only checkpoints --first 1234 --inputs 1
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fuzz_targets import TARGETS, Target
from helpers_fuzz import damage

from captioning.errors import InputError
from captioning.files import write_json
from captioning.provenance import provenance

SECONDS_EACH = 10
MEMORY = 4 << 30  # bytes beyond what the process has when it begins


class TookTooLong(BaseException):
    """No Exception, so that no reader takes it for an error of its own."""


@dataclass
class Tally:
    inputs: int = 0
    refused: int = 0
    faults: int = 0
    seconds: float = 0.0
    seen: set[str] = field(default_factory=set)


def set_timers(seconds: float) -> None:
    """End what computes for so long, or waits for six times as long, on a machine that may have other work."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 6 * seconds)


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


def report(name: str, number: int, seed: int, error: BaseException, tally: Tally, folder: Path) -> None:
    """Print a fault, the first time that it shows at its place."""
    tally.faults += 1
    frames = traceback.extract_tb(error.__traceback__)
    last = ([frame for frame in frames if "/captioning/" in frame.filename] or frames)[-1]
    place = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
    if place in tally.seen:
        return
    tally.seen.add(place)
    line = " ".join(str(error).split())[:300]
    print(f"FAULT {name}: {place}: {line}", file=sys.__stdout__)
    print(f"  python tests/fuzz.py --seed {seed} --only {name} --first {number} --inputs 1", file=sys.__stdout__)
    if "--traceback" in sys.argv:
        traceback.print_exception(error, file=sys.__stdout__)
    sys.__stdout__.flush()


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Let no input take more time or memory than it may."""

    def too_long(number: int, frame: Any) -> None:
        raise TookTooLong(f"more than {SECONDS_EACH} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, too_long)
    with warnings.catch_warnings(), open(os.devnull, "w") as nothing:
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        with contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
            yield


def fuzz(
    targets: dict[str, Target], *, seed: int, seconds: float, inputs: int | None, first: int, folder: Path
) -> dict[str, Tally]:
    """Run inputs, always of the target that has had the smallest part of its share of the time, until time is up."""
    tallies = {name: Tally() for name in targets}
    until = time.monotonic() + seconds
    for name, target in targets.items():
        prepare(target, folder / name)
        os.chdir(folder / name)
        if target.damaged and not target.leaves_traces:
            target.run(folder / name, random.Random(seed))  # as they are, the files are used
    while time.monotonic() < until:
        left = [name for name in targets if inputs is None or tallies[name].inputs < inputs]
        if not left:
            break
        name = min(left, key=lambda name: tallies[name].seconds / targets[name].share)
        tally, number = tallies[name], first + tallies[name].inputs
        begun = time.monotonic()
        tally.inputs += 1
        os.chdir(folder / name)
        try:
            tally.refused += (
                attempt(targets[name], folder / name, random.Random(f"{seed}/{name}/{number}")) == "refused"
            )
        except KeyboardInterrupt:
            break
        except BaseException as error:
            report(name, number, seed, error, tally, folder)
        os.chdir(folder)
        tally.seconds += time.monotonic() - begun
    return tallies


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="time limit (default: %(default)s)")
    parser.add_argument("--inputs", type=int, help="of each target; by default as many as there is time for")
    parser.add_argument("--first", type=int, default=0, help="number of the first input (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=TARGETS, help="targets (default: all)")
    parser.add_argument("--traceback", action="store_true", help="show where faults come from")
    parser.add_argument("--measurement", type=Path, metavar="JSON", help="write the counts and where they come from")
    args = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    measurement = args.measurement.resolve() if args.measurement else None
    home, memory_disk = os.getcwd(), Path("/dev/shm")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=memory_disk if memory_disk.is_dir() else None) as name:
        targets = {target: TARGETS[target](Path(name) / "made" / target) for target in args.only or TARGETS}
        with bounded():
            options = {"seed": args.seed, "inputs": args.inputs, "first": args.first, "folder": Path(name)}
            tallies = fuzz(targets, seconds=args.seconds, **options)
        os.chdir(home)
    total, faults = sum(t.inputs for t in tallies.values()), sum(t.faults for t in tallies.values())
    for target, tally in tallies.items():
        print(f"{target:14} {tally.inputs:9,} inputs, {tally.refused:9,} refused, {tally.faults} faults")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{total:,} inputs in {time.monotonic() - begun:.0f} s, {faults} faults, at most {peak:.0f} MB")
    if measurement is not None:
        content: dict[str, Any] = {
            "value": total,
            "unit": "damaged inputs, each used or refused in one line",
            "faults": faults,
            "targets": {name: {"inputs": t.inputs, "refused": t.refused} for name, t in tallies.items()},
            "seconds": round(time.monotonic() - begun),
            "peak_memory": {"value": round(peak), "unit": "MB"},
        }
        command = f"python tests/fuzz.py {shlex.join(sys.argv[1:])}"
        write_json(measurement, content | provenance(command=command, seed=args.seed))
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
