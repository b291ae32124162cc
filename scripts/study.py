#!/usr/bin/env python
"""Train and score every variant of a study, each with several seeds, and make the study's tables.

A study is a YAML file such as those in configs/studies. Its runs and scores have its name, so no two
studies may share one. The scores of all runs are written to docs/measurements/STUDY.json. After
Ctrl-C, run the same command again to continue. A run that was trained further after it was scored is
scored again. With --report, nothing is trained: the command writes tables of the runs' scores and
tests between <!-- study NAME --> and <!-- end --> in a page.

examples:
  python scripts/study.py configs/studies/lite2.yaml --jobs 2
  python scripts/study.py configs/studies/lite2.yaml --only soft summed_rows --seeds 1 --dry_run
  python scripts/study.py configs/studies/lite2.yaml --report table.md
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from commands import Commands
from measurements import Scores, measurement_of, read_scores, score_name, write_measurements
from study_file import TRAINING, Study, config_of, read_study

from captioning.comparison.runs import Run, read_run
from captioning.errors import InputError, exits_on_input_error
from captioning.provenance import provenance
from captioning.run_folder import RunFolder, checksum
from captioning.settings import command_line, read_config

SPEED = "captions_per_second"
_LOCK = threading.Lock()  # runs that end at the same time write into one file


# Training


class Command(NamedTuple):
    """A command that is left to run; ``evaluation`` names the scores that it makes, None if it trains."""

    description: str
    arguments: list[str]
    evaluation: str | None = None


class Job(NamedTuple):
    """One run: its training, its scores and its further evaluations."""

    study: Study
    variant: str
    seed: int
    runs: Path
    file: Path

    @property
    def name(self) -> str:
        return f"{self.study.name}_{self.variant}_{self.seed}"

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.runs / self.name)

    @property
    def initial_jobs(self) -> list[Job]:
        """The runs whose best checkpoints this run starts from or averages."""
        return [self._replace(variant=variant) for variant in self.study.variants[self.variant].initial_variants]

    @property
    def stage(self) -> int:
        """The length of the longest chain of runs that must be trained before this one."""
        return max((1 + job.stage for job in self.initial_jobs), default=0)

    @property
    def weights(self) -> list[str]:
        """Checksums: of the best checkpoint and, for an average, of the checkpoints that it averages."""
        averaged_jobs = self.initial_jobs if self.study.variants[self.variant].average else []
        return [checksum(job.folder.checkpoint("best")) for job in (self, *averaged_jobs)]

    def score(self, evaluation: str = "") -> Scores | None:
        return read_scores(self.file).get(score_name(self.variant, self.seed, evaluation))

    def is_scored(self, evaluation: str = "") -> bool:
        """Return whether the run's current weights have a score; without checkpoints, whether any score exists."""
        score, weights = self.score(evaluation), self.weights
        return score is not None and ("" in weights or score.get("weights", weights) == weights)

    def commands_left(self) -> Iterator[Command]:
        """Yield the commands that are left to run. Each depends on the results of the command before it."""
        variant, best = self.study.variants[self.variant], str(self.folder.checkpoint("best"))
        starts = [str(job.folder.checkpoint("best")) for job in self.initial_jobs]
        if not self.is_scored() and variant.config is None:
            models = [word for model in starts for word in ("--model", model)]
            yield Command("average", ["average", *models, "--output", best])
        elif not self.is_scored():
            command = ["fit", "--config", str(config_of(variant.config)), f"--seed_everything={self.seed}"]
            command += [*self.study.fit, *variant.fit, f"--runs={self.runs}", f"--name={self.name}"]
            command += ["--trainer.logger=false", *(f"--init_from={start}" for start in starts)]
            last = self.folder.checkpoint("last")
            command += [f"--ckpt_path={last}"] if last.is_file() else []  # a complete training ends at once
            yield Command("train on from its last checkpoint" if last.is_file() else "train", command)
        for evaluation, options in {"": [], **variant.evaluations}.items():
            if not self.is_scored(evaluation):
                # The captions in the run's folder stay those of the study's own evaluation.
                command = ["test", f"--ckpt_path={best}", *self.study.evaluate, *options]
                if variant.config is None:  # a mean of models has no configuration of its own
                    command.append(f"--config={self.initial_jobs[0].folder.config}")
                command += [f"--results={self.folder.path / evaluation}"]
                yield Command(f"score {evaluation}".rstrip(), command, evaluation)

    def finish(self, commands: Commands) -> None:
        """Run the commands that are left. Raises InputError if a run that this one starts from has no score."""
        for initial_job in self.initial_jobs:
            if not self.is_scored() and not initial_job.is_scored():
                raise InputError(f"{self.name}: starts from {initial_job.name}, which is not trained and scored")
        for command in self.commands_left():
            self.folder.release()  # of a training that was killed before its first checkpoint
            commands.run(self.name, command.arguments)
            if command.evaluation is not None:
                self.record(command)

    def record(self, command: Command) -> None:
        """Copy the metrics that the command wrote into the study's file, with the training's speed and statistics."""
        scores = measurement_of(self.folder.path / command.evaluation, command.arguments, self.seed)
        if not command.evaluation and (training := training_of(read_run(self.folder.path))):
            scores["training"] = training
        scores["weights"] = self.weights
        with _LOCK:
            name = score_name(self.variant, self.seed, command.evaluation)
            write_measurements(self.file, scores=read_scores(self.file) | {name: scores})


def training_of(run: Run) -> dict[str, Any]:
    """Return the speed of a training, and its statistics' means in each tenth of it, as far as they were logged."""
    training: dict[str, Any] = {}
    if (speed := run.captions_per_second) is not None:
        training[SPEED] = round(speed, 1)
    last = max((curve[-1][0] for curve in run.curves.values()), default=0) + 1
    for name in TRAINING:
        tenths: list[list[float]] = [[] for _ in range(10)]
        for step, value in run.curves.get(f"train/{name}", []):
            tenths[step * 10 // last].append(value)
        if any(tenths):
            training[name] = [float(f"{statistics.fmean(values):.4g}") if values else None for values in tenths]
    return training


def train(study: Study, jobs: Sequence[Job], jobs_at_once: int) -> None:
    """Run the commands that are left.

    Raises:
        InputError: Data are missing, or runs failed. The other runs are then done.
    """
    waiting = [job for job in jobs if any(job.commands_left())]
    print(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are done", flush=True)
    commands = Commands(jobs_at_once)
    if waiting:
        prepare(study, waiting, commands)
    outcomes = []
    for stage in sorted({job.stage for job in waiting}):
        stage_jobs = [job for job in waiting if job.stage == stage]
        outcomes += commands.side_by_side(lambda job: job.finish(commands), stage_jobs)
    if failed := [outcome for outcome in outcomes if isinstance(outcome, InputError)]:
        raise InputError(f"{len(failed)} of {len(waiting)} runs failed: {'; '.join(map(str, failed))}")


def prepare(study: Study, jobs: Sequence[Job], commands: Commands) -> None:
    """Prepare the data of the jobs' configurations, and extract features. Existing data and features stay."""
    from captioning.cli.build import build
    from captioning.data import CaptionSource

    for variant in {job.variant: study.variants[job.variant] for job in jobs}.values():
        if variant.config is not None:
            words = [*study.fit, *variant.fit]
            overlays = [Path(word.partition("=")[2]) for word in words if word.startswith("--config=")]
            settings = [read_config(path) for path in (config_of(variant.config), *overlays)]
            options = [word for word in words if word.startswith("--data.source")]
            build({"data.source": CaptionSource}, settings, options)[0]["data.source"].prepare()
    if (features := study.features) is not None:
        command = ["extract", "--config", str(config_of(features.config)), "--output", features.output]
        command += [word for split in features.splits for word in ("--split", split)]
        commands.run("features", [*command, "--flipped"] if features.flipped else command)


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    argv = command_line(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, metavar="FILE.yaml", help="such as configs/studies/lite2.yaml")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="train only these variants (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="train only with these seeds (default: all)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs side by side (default: %(default)s)")
    parser.add_argument("--dry_run", action="store_true", help="only list what is done and what is left")
    parser.add_argument("--report", type=Path, metavar="PAGE.md", help="write the study's tables into this page")
    parser.add_argument("--runs", type=Path, default="runs", metavar="DIR", help="of all runs (default: %(default)s)")
    parser.add_argument("--measurements", type=Path, default="docs/measurements", metavar="DIR", help="of the scores")
    args = parser.parse_args(argv)
    study = read_study(args.study)
    file = args.measurements / f"{study.name}.json"
    if args.report is not None:
        from study_tables import write_report

        origin = provenance(command=f"python scripts/study.py {shlex.join(argv)}", seed=None)
        notices = write_report(study, file, args.runs, args.report, origin)
        jobs = [Job(study, variant, seed, args.runs, file) for variant in study.variants for seed in study.seeds]
        old = [job.name for job in jobs if job.score() and not job.is_scored()]
        for notice in [*notices, *(f"{name} was scored before its weights changed; score it again" for name in old)]:
            print(f"note: {notice}")
        return
    if unknown := [name for name in args.only or () if name not in study.variants]:
        raise InputError(f"--only: {unknown[0]} is not in {args.study}; there are {', '.join(study.variants)}")
    jobs = [
        Job(study, variant, seed, args.runs, file)
        for seed in args.seeds or study.seeds
        for variant in args.only or study.variants
    ]
    if not args.dry_run:
        train(study, jobs, args.jobs)
        return
    for job in jobs:
        left = ", ".join(command.description for command in job.commands_left())
        print(f"{job.name:32} {f'left: {left}' if left else 'done'}")


if __name__ == "__main__":
    main()
