"""Python commands that run side by side, their progress printed line by line with what each is for."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from captioning.errors import InputError, printable

Item = TypeVar("Item")
Result = TypeVar("Result")


class Commands:
    """Runs commands of which several may run at once, each with its share of the processor.

    Args:
        jobs: how many at once. A small model cannot keep many cores busy: two at once take little longer than one.
        shown: how lines begin that are printed.
    """

    def __init__(self, jobs: int, shown: str) -> None:
        self.jobs = jobs
        self._shown = re.compile(shown)
        self._stopped = False
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // jobs))
        self._environment = os.environ | {"OMP_NUM_THREADS": threads}

    def run(self, name: str, arguments: Sequence[str]) -> float:
        """Run ``python`` with these arguments and print its progress behind ``name``; returns the seconds it took.

        Raises:
            InputError: it failed, with its reason, or was interrupted.
        """
        _say(f"{name}  $ python {printable(shlex.join(arguments))}")
        started = time.perf_counter()
        others: deque[str] = deque(maxlen=20)
        with subprocess.Popen(
            [sys.executable, *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            for line in process.stdout or ():
                if self._shown.match(line):
                    _say(f"{name}  {printable(line.rstrip())}")
                else:
                    others.append(line)
        if self._stopped:
            raise InputError(f"{name}: interrupted")
        if process.returncode:
            said = [line.partition("error: ")[2] for line in others if line.startswith("error: ")]
            raise InputError(f"{name} failed: {' '.join(''.join(said[-1:] or list(others)[-3:]).split())}")
        seconds = time.perf_counter() - started
        _say(f"{name}  finished after {seconds:.0f} s")
        return seconds

    def side_by_side(self, task: Callable[[Item], Result], items: Iterable[Item]) -> list[Result | InputError]:
        """Return what ``task``, which calls ``run``, gives for every item; its InputError where it failed.

        Ctrl-C reaches the commands, too: it is raised when each has saved where it is, and no other is started.
        """

        def outcome(item: Item) -> Result | InputError:
            try:
                return task(item)
            except InputError as error:
                return error

        with ThreadPoolExecutor(self.jobs) as pool:
            futures = [pool.submit(outcome, item) for item in items]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self._stopped = True
                pool.shutdown(cancel_futures=True)
                raise


def _say(line: str) -> None:
    print(f"{line}\n", end="", flush=True)  # in one piece: another thread may print at the same time
