#!/usr/bin/env python
"""Train and score every variant of a study, each with several seeds, and make the study's tables.

A study is a YAML of configs/studies: variants of configurations that differ in what is compared and in nothing else.
The scores of a run are written to docs/measurements/STUDY_VARIANT_SEED.json; a run that has them is done, one that was
interrupted goes on where it stopped. Features that the study names are extracted first. Ctrl-C saves every run: the
same command goes on.

With --report nothing is trained: the part of a page between <!-- study NAME --> and <!-- end --> is made anew from the
scores and the captions in the run folders, and the tests of it are written to docs/measurements/STUDY_comparison.json.

examples:
  python scripts/study.py configs/studies/flickr8k.yaml --jobs 2
  python scripts/study.py configs/studies/flickr8k.yaml --only soft marginal_blocks --seeds 1 --dry-run
  python scripts/study.py configs/studies/flickr8k.yaml --report docs/results.md
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from captioning.cli.arguments import script_parser
from captioning.cli.commands import Commands
from captioning.errors import InputError, exits_on_input_error
from captioning.run_folder import RunFolder

if TYPE_CHECKING:
    from captioning.comparison.study import Study, Variant

REPOSITORY = Path(__file__).resolve().parent.parent
_PROGRESS = "run folder|generating|epoch|best checkpoint|brevity penalty|(train|val|test): |written to"


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = script_parser(__doc__)
    parser.add_argument("study", type=Path, help="a YAML of configs/studies")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="(default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, help="some of the study's (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="list what is done and what is left, and do nothing")
    parser.add_argument("--report", type=Path, metavar="PAGE.md", help="make the study's part of this page anew")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="(default: %(default)s)")
    parser.add_argument("--measurements", type=Path, default=Path("docs/measurements"), help="(default: %(default)s)")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        raise InputError(f"--jobs: must be at least 1, got {args.jobs}")

    from captioning.comparison.study import read_study

    study = read_study(args.study, _relative("configs"))
    if args.report is not None:
        others = {"--only": args.only, "--seeds": args.seeds, "--dry-run": args.dry_run, "--jobs": args.jobs > 1}
        if given := [option for option, value in others.items() if value]:
            raise InputError(f"--report: makes the whole study's part of the page; leave out {', '.join(given)}")
        report(study, args.report, args.runs, args.measurements, argv)
        return
    for option, chosen, known in (("--only", args.only, study.variants), ("--seeds", args.seeds, study.seeds)):
        if unknown := [name for name in chosen or () if name not in known]:
            raise InputError(f"{option}: {unknown[0]} is not in {args.study}; there are {', '.join(map(str, known))}")
    jobs = [
        Job(study, variant, seed, args.runs, args.measurements)
        for seed in dict.fromkeys(args.seeds or study.seeds)
        for variant in dict.fromkeys(args.only or study.variants)
    ]
    if args.dry_run:
        list_state(study, jobs)
    else:
        train(study, jobs, args.jobs)


class Command(NamedTuple):
    what: str
    arguments: list[str]


@dataclass(frozen=True)
class Job:
    """One run: its training, its scores and its further evaluations."""

    study: Study
    variant: str
    seed: int
    runs: Path
    measurements: Path

    @property
    def name(self) -> str:
        return self.study.run_name(self.variant, self.seed)

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.runs / self.name)

    @property
    def before(self) -> list[Job]:
        """The runs whose best checkpoints this one begins with, or is the mean of."""
        return [replace(self, variant=variant) for variant in self.study.variants[self.variant].begins_with]

    @property
    def stage(self) -> int:
        """How many runs come before, one after the other."""
        return max((1 + job.stage for job in self.before), default=0)

    def measurement(self, evaluation: str = "") -> Path:
        return self.measurements / f"{self.study.run_name(self.variant, self.seed, evaluation)}.json"

    def left(self) -> Iterator[Command]:
        """Yield the commands that are left to do, each when the ones before it are done."""
        variant = self.study.variants[self.variant]
        if not self.measurement().is_file():
            yield self._average() if variant.config is None else self._fit(variant, variant.config)
            yield Command("score", self._evaluate("", []))
        for evaluation, options in variant.evaluations.items():
            if not self.measurement(evaluation).is_file():
                # The captions in the run's folder stay those of the study's own evaluation.
                results = ["--results", str(self.folder.path / evaluation)]
                yield Command(f"score {evaluation}", self._evaluate(evaluation, [*options, *results]))

    def _average(self) -> Command:
        checkpoints = [str(job.folder.checkpoint("best")) for job in self.before]
        command = [str(_relative("scripts/average_checkpoints.py")), *checkpoints]
        return Command("average", [*command, "--output", str(self.folder.checkpoint("best"))])

    def _fit(self, variant: Variant, config: Path) -> Command:
        command = ["-m", "captioning", "fit", "--config", str(config), "--seed_everything", str(self.seed)]
        command += [*self.study.fit, *variant.fit, "--runs", str(self.runs), "--name", self.name]
        command += ["--trainer.logger=false"]
        for first in self.before:
            command += ["--init_from", str(first.folder.checkpoint("best"))]
        last = self.folder.checkpoint("last")
        if last.is_file():  # a run that is trained to its end ends at once
            return Command("train on from its last checkpoint", [*command, "--ckpt_path", str(last)])
        return Command("train", command)

    def _evaluate(self, evaluation: str, options: list[str]) -> list[str]:
        command = [str(_relative("scripts/evaluate.py")), "--checkpoint", str(self.folder.checkpoint("best"))]
        return [*command, *self.study.evaluate, *options, "--measurement", str(self.measurement(evaluation))]


def list_state(study: Study, jobs: list[Job]) -> None:
    """Print what is done and what is left, a line for each."""
    if study.features is not None:
        missing = _missing_splits(study)
        left = f"left: extract {', '.join(missing)}" if missing else "there"
        print(f"{'features':32} {left}  ({study.features.output})")
    done = 0
    for job in jobs:
        left = [command.what for command in job.left()]
        done += not left
        print(f"{job.name:32} {'left: ' + ', '.join(left) if left else 'done'}")
    print(f"{done} of {len(jobs)} runs are done")


def train(study: Study, jobs: list[Job], side_by_side: int) -> None:
    """Do what is left.

    Raises:
        InputError: data are missing, or runs failed; the others are done then.
    """
    from captioning.comparison.study_report import add_speed

    waiting = [job for job in jobs if any(job.left())]
    print(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are done", flush=True)
    commands = Commands(side_by_side, _PROGRESS)
    if waiting:
        _prepare(study, waiting, commands)

    def finish(job: Job) -> None:
        folder = job.folder
        trains = study.variants[job.variant].config is not None and not job.measurement().is_file()
        if trains and folder.checkpoints.exists() and not folder.checkpoint("last").is_file():
            raise InputError(f"{folder.path}: has no last checkpoint to go on from; delete it to train the run anew")
        for first in job.before:
            if not (job.measurement().is_file() or first.measurement().is_file()):
                raise InputError(f"{job.name}: begins with {first.name}, which is not trained and scored")
        for command in job.left():
            best = folder.checkpoint("best")
            if command.what.startswith("score") and job.measurement().is_file() and not best.is_file():
                raise InputError(
                    f"{best}: no such file to {command.what}; delete {job.measurement()} to train it again"
                )
            commands.run(job.name, command.arguments)

    outcomes = []
    for stage in sorted({job.stage for job in waiting}):
        outcomes += commands.side_by_side(finish, [job for job in waiting if job.stage == stage])
    for job in jobs:
        add_speed(job.measurement(), job.folder.path)
    failed = [outcome for outcome in outcomes if isinstance(outcome, InputError)]
    if failed:
        raise InputError(f"{len(failed)} of {len(waiting)} runs failed: {'; '.join(map(str, failed))}")


def _prepare(study: Study, jobs: list[Job], commands: Commands) -> None:
    """See that the data of the jobs' configurations are there, and compute the features that are not.

    Raises:
        InputError: what is missing, and what to do.
    """
    from captioning.cli.build import build
    from captioning.data import CaptionSource
    from captioning.settings import read_config

    prepared = set()
    for variant in {job.variant: study.variants[job.variant] for job in jobs}.values():
        words = [*study.fit, *variant.fit]
        options = tuple(word for word in words if word.startswith("--data.source"))
        overlays = [Path(word.partition("=")[2]) for word in words if word.startswith("--config=")]
        if variant.config is None:
            continue
        where = (variant.config, *overlays)
        if (where, options) not in prepared:
            prepared.add((where, options))
            (source,) = build({"data.source": CaptionSource}, [read_config(path) for path in where], options)
            source.prepare()
    if study.features is not None and _missing_splits(study):
        command = [str(_relative("scripts/extract_features.py")), "--config", str(study.features.config), "--splits"]
        flipped = ["--flipped"] if study.features.flipped else []
        commands.run("features", [*command, *study.features.splits, "--output", str(study.features.output), *flipped])


def _missing_splits(study: Study) -> list[str]:
    from captioning.data.features import flipped_split, is_extracted

    assert study.features is not None
    wanted = [*study.features.splits, *([flipped_split("train")] if study.features.flipped else [])]
    return [split for split in wanted if not is_extracted(study.features.output, split)]


def report(study: Study, page: Path, runs: Path, measurements: Path, argv: list[str]) -> None:
    """Make the study's part of a page and the file of its tests."""
    from captioning.comparison.study_report import (
        add_speed,
        compare_variants,
        insert,
        markdown,
        mean_curves,
        read_measurements,
    )
    from captioning.files import write_json
    from captioning.provenance import provenance

    command = f"python scripts/study.py {shlex.join(argv)}"
    for variant in study.variants:
        for seed in study.seeds:
            job = Job(study, variant, seed, runs, measurements)
            add_speed(job.measurement(), job.folder.path)
    measured = read_measurements(study, measurements)
    comparison = measurements / f"{study.name}_comparison.json"
    tests, notices = compare_variants(study, measured, runs, comparison)
    curves = mean_curves(study, measured, runs, comparison)
    insert(page, study.name, markdown(study, measured, tests, curves, command))
    if tests or curves:
        content = {"metric": "bleu4", "tests": [test.to_dict() for test in tests], "curves": curves}
        write_json(comparison, content | provenance(command=command, seed=0))
        print(f"tests    {comparison}")
    print(f"page     {page}")
    for notice in notices:
        print(f"note: {notice}")


def _relative(path: str) -> Path:
    """Return a path of the repository as seen from here."""
    return Path(os.path.relpath(REPOSITORY / path))


if __name__ == "__main__":
    main()
