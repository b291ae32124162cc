#!/usr/bin/env python
"""Kill a training run at every file operation in its folder, resume it, and see that nothing is lost.

A run of three epochs is done once whole. Then it is done again and again in a process that ends, without any clean-up,
at its first, second, .. file operation: before a file is opened, written (and with half of it written), closed, synced,
renamed or removed. What is left is resumed with `captioning fit --ckpt_path last`, or begun again if nothing had been
saved. A kill is survived if no checkpoint is damaged, the resumed run ends well, and its weights, optimizer and random
state are those of the whole run to the last bit.
(A process is killed here, not the power: what was written is on disk.)

examples:
  python tests/kill_points.py --json docs/measurements/kill_points.json
  python tests/kill_points.py --only 17 18
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import functools
import io
import logging
import os
import shlex
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch
import yaml
from helpers_runs import tiny_config

from captioning.checkpoint.io import damage_of
from captioning.files import write_json
from captioning.provenance import provenance

KILLED, FAILED = 77, 78
RUN = Path("runs/tiny")
LAST = RUN / "checkpoints/last.ckpt"


class Watched:
    """A file that is being written, each write a point at which the process may end."""

    def __init__(self, file: Any, path: str, point: Callable[[str, str], None]) -> None:
        self._file, self._path, self._point = file, path, point

    def write(self, content: Any) -> int:
        self._point("write", self._path)
        half = len(content) // 2
        self._file.write(content[:half])
        self._file.flush()
        self._point("write half of", self._path)
        return half + self._file.write(content[half:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *error: object) -> None:
        self._point("close", self._path)
        self._file.close()


def watch(folder: Path, kill_at: int | None) -> list[tuple[str, str]]:
    """Note every file operation below a folder from now on, and end this process before the one of that number.

    Returns:
        a list that grows: what is done, and the name of the file.
    """
    done: list[tuple[str, str]] = []
    root = str(folder.resolve())

    def point(what: str, path: Any) -> None:
        name = os.path.realpath(path)
        if name.startswith(root):
            done.append((what, os.path.relpath(name, root)))
            if len(done) == kill_at:
                os._exit(KILLED)

    def wrap(module: Any, name: str, what: str) -> None:
        function = getattr(module, name)

        def wrapped(path: Any, *args: Any, **options: Any) -> Any:
            point(what, f"/proc/self/fd/{path}" if isinstance(path, int) else path)
            return function(path, *args, **options)

        setattr(module, name, wrapped)

    for name in ("fsync", "replace", "rename", "unlink", "remove", "mkdir", "rmdir"):
        wrap(os, name, name)
    real_open = io.open

    def watched_open(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        writes = isinstance(file, (str, os.PathLike)) and any(letter in mode for letter in "wax+")
        if not writes or not os.path.realpath(file).startswith(root):
            return real_open(file, mode, *args, **options)
        point("open", file)
        return Watched(real_open(file, mode, *args, **options), os.fspath(file), point)

    builtins.open = io.open = watched_open  # type: ignore[assignment]
    return done


def in_a_process(run: Callable[[], None]) -> int:
    """Run a function in a copy of this process and return its exit code.

    Nothing of PyTorch's autograd may have run here before, since its threads are not copied.
    """
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, none of which is needed
        child = os.fork()
    if child == 0:
        code = FAILED
        try:
            run()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Served(BaseException):
    """Ends a command line whose trainer was lent out."""


def with_trainer(serve: Callable[[Callable[[], None]], None], *options: str) -> None:
    """Run `captioning fit` of three epochs in the working directory up to its trainer's work, and lend that out.

    Args:
        serve: called with what does the work, to be called in a process of its own each time.
    """
    from captioning.cli.fit import main

    real = pl.Trainer.fit

    @functools.wraps(real)  # its arguments are options of the command line
    def lend(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        serve(lambda: real(trainer, *args, **kwargs))
        raise Served

    sys.argv = ["captioning"]
    with contextlib.suppress(Served), warnings.catch_warnings(), patch.object(pl.Trainer, "fit", lend):
        warnings.simplefilter("ignore")
        main(["fit", "--config", "tiny.yaml", "--trainer.max_epochs", "3", *options])


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Return what of a checkpoint must be equal: weights, optimizer, random state, step."""
    content = torch.load(checkpoint, weights_only=True)
    return {name: content[name] for name in ("state_dict", "optimizer_states", "random_state", "global_step")}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def lay_out(*layers: Path) -> None:
    """Let the run's folder hold a copy of what is in these folders, later ones over earlier ones, and its lock."""
    RUN.mkdir(parents=True, exist_ok=True)
    for entry in RUN.iterdir():
        if entry.name != ".lock":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for files in layers:
        shutil.copytree(files, RUN, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".lock"))


def quietly(work: Callable[[], None]) -> None:
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        logging.disable(logging.CRITICAL)
        torch.set_num_threads(1)
        work()


class Kills:
    """All kills of one run.

    Attributes:
        points: the file operations of the whole run.
        problems: by the number of the operation, what went wrong; "" if the kill was survived.
    """

    def __init__(self, folder: Path, every: int, only: list[int] | None) -> None:
        self.folder, self.every, self.only = folder, every, only
        self.points: list[str] = []
        self.expected: dict[str, Any] = {}
        self.problems: dict[int, str] = {}

    def run(self) -> None:
        config = tiny_config(self.folder / "shapes")
        config["model"]["optimizer"] = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.003}}
        Path("tiny.yaml").write_text(yaml.safe_dump(config))
        with_trainer(self.kill)
        lay_out(self.folder / "whole")
        with_trainer(self.resume, "--ckpt_path", "last")

    def kill(self, fit: Callable[[], None]) -> None:
        """Do the run once whole, and kill it at its operations; begin it again where it had saved nothing."""

        def whole() -> None:
            done = watch(RUN, None)
            quietly(fit)
            (self.folder / "operations").write_text("".join(f"{what} {path}\n" for what, path in done))

        shutil.copytree(RUN, self.folder / "begun")  # the logger has been there already
        if in_a_process(whole):
            raise RuntimeError("the run that is not killed failed")
        self.expected = state_of(LAST)
        self.points = (self.folder / "operations").read_text().splitlines()
        shutil.copytree(RUN, self.folder / "whole")
        for number in self.only or range(1, len(self.points) + 1, self.every):

            def killed(number: int = number) -> None:
                watch(RUN, number)
                quietly(fit)

            lay_out(self.folder / "begun")
            code = in_a_process(killed)
            shutil.copytree(RUN, self.folder / str(number))
            if code != KILLED:
                self.note(number, f"ended with {code} before it was killed")
            elif not LAST.exists():
                shutil.move(RUN / "metrics/version_0", RUN / "metrics/version_9")  # a new run logs into a new folder
                shutil.copytree(self.folder / "begun/metrics", RUN / "metrics", dirs_exist_ok=True)
                self.note(number, self.survives(fit))

    def resume(self, fit: Callable[[], None]) -> None:
        """Go on with every run that was killed after its first save."""
        shutil.copytree(RUN / "metrics", self.folder / "again/metrics")
        for number in sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit()):
            if number not in self.problems:
                lay_out(self.folder / "again", self.folder / str(number))
                self.note(number, self.survives(fit))

    def survives(self, fit: Callable[[], None]) -> str:
        """Go on in the run's folder; return "" if all is well, else what is wrong."""
        for path in (LAST, LAST.with_name("best.ckpt")):
            if path.exists() and (damage := damage_of(path)) is not None:
                return f"{path.name} is damaged: {damage}"
        for path in (path for path in (RUN / "config.yaml",) if path.exists()):
            if "model" not in (yaml.safe_load(path.read_text()) or {}):
                return f"{path.name} is cut short"
        if (code := in_a_process(lambda: quietly(fit))) != 0:
            return f"the resumed run ended with {code}"
        return "" if same(state_of(LAST), self.expected) else "other weights than those of the whole run"

    def note(self, number: int, problem: str) -> None:
        self.problems[number] = problem
        print(f"{number:4} {self.points[number - 1]:46} {problem or 'survived'}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try every Nth operation (default: 1)")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of file operations (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figure and where it comes from")
    args = parser.parse_args()
    measurement = args.json.resolve() if args.json else None
    home = os.getcwd()
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "work").mkdir()
        os.chdir(Path(name) / "work")
        kills = Kills(Path(name), args.every, args.only)
        kills.run()
        os.chdir(home)
    survived = sum(not problem for problem in kills.problems.values())
    print(f"{survived} of {len(kills.problems)} kills survived")
    if measurement is not None:
        content = {
            "value": survived,
            "unit": "kills survived",
            "tried": len(kills.problems),
            "operations": kills.points,
            "lost": {f"{n} {kills.points[n - 1]}": problem for n, problem in kills.problems.items() if problem},
        }
        command = f"python tests/kill_points.py {shlex.join(sys.argv[1:])}"
        write_json(measurement, content | provenance(command=command, seed=1))
    return int(survived < len(kills.problems))


if __name__ == "__main__":
    sys.exit(main())
