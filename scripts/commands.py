"""Runs of ``captioning`` side by side. Each line of their progress is printed behind the name of its run."""

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

PROGRESS = "run folder|nothing is left|drawing|epoch|best checkpoint|BLEU-4|Pointing accuracy|written to"
"""Beginnings of the lines that report the progress of training and testing."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class Commands:
    """Runs several commands at once, and divides the processor's cores among them.

    Args:
        jobs: Number of commands at once. A small model cannot keep many cores busy: two take little longer than one.
        shown: Regular expression for the beginning of the lines that are printed.
    """

    def __init__(self, jobs: int, shown: str = PROGRESS) -> None:
        self.jobs, self._shown, self._stopped = jobs, re.compile(shown), False
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // jobs))
        self._environment = os.environ | {"OMP_NUM_THREADS": threads}

    def run(self, name: str, arguments: Sequence[str]) -> float:
        """Run ``captioning`` with these arguments and print its progress behind ``name``; return its seconds.

        Raises:
            InputError: The command failed (the message has the reason) or was interrupted.
        """
        print(f"{name}  $ captioning {printable(shlex.join(arguments))}\n", end="", flush=True)
        started, unshown = time.perf_counter(), deque[str](maxlen=20)
        with subprocess.Popen(
            [sys.executable, "-m", "captioning", *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            for line in process.stdout or ():
                if self._shown.match(line):
                    # In one write, because other threads print, too.
                    print(f"{name}  {printable(line.rstrip())}\n", end="", flush=True)
                else:
                    unshown.append(line)
        if self._stopped:
            raise InputError(f"{name}: interrupted")
        if process.returncode:
            errors = [line.partition("error: ")[2] for line in unshown if line.startswith("error: ")]
            raise InputError(f"{name} failed: {' '.join(''.join(errors[-1:] or list(unshown)[-3:]).split())}")
        return time.perf_counter() - started

    def side_by_side(self, task: Callable[[Item], Result], items: Iterable[Item]) -> list[Result | InputError]:
        """Call ``task``, which calls ``run``, for every item; return its results or InputErrors, in the items' order.

        Ctrl-C reaches the commands, too. KeyboardInterrupt is raised after all of them have saved; no other is started.
        """

        def result_or_error(item: Item) -> Result | InputError:
            try:
                return task(item)
            except InputError as error:
                print(f"error: {error}\n", end="", flush=True)  # now, because the other items may take hours
                return error

        with ThreadPoolExecutor(self.jobs) as pool:
            futures = [pool.submit(result_or_error, item) for item in items]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self._stopped = True
                pool.shutdown(cancel_futures=True)
                raise
