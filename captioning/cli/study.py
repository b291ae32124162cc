"""Train and score every variant of a study, each with several seeds, and make the study's tables.

A study is a YAML file such as those in configs/studies; its configurations are those of the clone
or, outside a clone, of configs/ in the working directory. The scores of all runs are written to
docs/measurements/STUDY.json. After Ctrl-C, run the same command again to continue. With --report,
nothing is trained: the command makes the tables between <!-- study NAME --> and <!-- end --> in a
page from the scores and captions of the runs.

examples:
  captioning study configs/studies/flickr8k.yaml --jobs 2
  captioning study configs/studies/flickr8k.yaml --only soft marginal_blocks --seeds 1 --dry_run
  captioning study configs/studies/flickr8k.yaml --report docs/results.md
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from captioning.cli.arguments import script_parser
from captioning.cli.commands import Commands
from captioning.cli.outputs import OutputFile
from captioning.comparison.measurements import TENTHS, TRAINING_STATISTICS, add_scores, read_scores, score_name
from captioning.errors import InputError, exits_on_input_error
from captioning.files import read_json
from captioning.run_folder import RunFolder

if TYPE_CHECKING:
    from captioning.comparison.runs import Run
    from captioning.comparison.study import Study

REPOSITORY = Path(__file__).resolve().parents[2]
_PROGRESS = "run folder|generating|epoch|best checkpoint|brevity penalty|(train|val|test): |written to"


def parser() -> argparse.ArgumentParser:
    parser = script_parser(__doc__, "study")
    parser.add_argument(
        "study", type=Path, metavar="FILE.yaml", help="the study, such as configs/studies/flickr8k.yaml"
    )
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="train only these variants (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="train only with these seeds (default: all)")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs to train side by side (default: %(default)s)"
    )
    parser.add_argument("--dry_run", action="store_true", help="only list what is done and what is left")
    parser.add_argument("--report", type=OutputFile(""), metavar="PAGE.md", help="make the study's tables in this page")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of all runs (default: %(default)s)"
    )
    parser.add_argument(
        "--measurements",
        type=Path,
        default=Path("docs/measurements"),
        metavar="DIR",
        help="folder of the scores (default: %(default)s)",
    )
    return parser


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    if args.jobs < 1:
        raise InputError(f"--jobs: must be at least 1, got {args.jobs}")

    from captioning.comparison.study import read_study

    study = read_study(args.study, _configs())
    if args.report is not None:
        unused = {"--only": args.only, "--seeds": args.seeds, "--dry_run": args.dry_run, "--jobs": args.jobs > 1}
        if given := [option for option, value in unused.items() if value]:
            raise InputError(f"--report: makes the tables of the whole study; leave out {', '.join(given)}")
        report(study, args.report, args.runs, args.measurements, argv)
        return
    for option, chosen, names in (("--only", args.only, study.variants), ("--seeds", args.seeds, study.seeds)):
        if unknown := [name for name in chosen or () if name not in names]:
            raise InputError(f"{option}: {unknown[0]} is not in {args.study}; there are {', '.join(map(str, names))}")
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
    """A command that is left to run. ``evaluation`` is the name of what it scores, None if it trains."""

    what: str
    arguments: list[str]
    evaluation: str | None = None


@dataclass(frozen=True)
class Job:
    """One run: its training, its scores and its further evaluations.

    Attributes:
        study: The study.
        variant: The name of the variant.
        seed: The seed.
        runs: The folder of the runs.
        measurements: The folder of the measurements.
    """

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
        """The runs whose best checkpoints this one starts from, or is an average of."""
        return [replace(self, variant=variant) for variant in self.study.variants[self.variant].begins_with]

    @property
    def stage(self) -> int:
        """How many runs come before, one after the other."""
        return max((1 + job.stage for job in self.before), default=0)

    @property
    def file(self) -> Path:
        """The file of the study's scores."""
        return self.study.measurements(self.measurements)

    def is_scored(self, evaluation: str = "") -> bool:
        return score_name(self.variant, self.seed, evaluation) in read_scores(self.file)

    def left(self) -> Iterator[Command]:
        """Yield the commands that are left to run, each when the ones before it are done."""
        variant = self.study.variants[self.variant]
        if not self.is_scored():
            yield self._average() if variant.config is None else self._fit(variant.config, variant.fit)
            yield Command("score", self._evaluate("", []), "")
        for evaluation, options in variant.evaluations.items():
            if not self.is_scored(evaluation):
                # The captions in the run's folder stay those of the study's own evaluation.
                results = ["--results", str(self.folder.path / evaluation)]
                yield Command(f"score {evaluation}", self._evaluate(evaluation, [*options, *results]), evaluation)

    def record(self, evaluation: str) -> None:
        """Copy the scores that were written last into the study's file, with the training's speed and statistics."""
        from captioning.comparison.runs import read_run

        scores = read_json(self._written_scores(evaluation))
        run = read_run(self.folder.path)
        if not evaluation and (training := _training(run)):
            scores["training"] = training
        add_scores(self.file, score_name(self.variant, self.seed, evaluation), scores)

    def _written_scores(self, evaluation: str) -> Path:
        return self.folder.path / f"measurement{'_' if evaluation else ''}{evaluation}.json"

    def _average(self) -> Command:
        models = [word for job in self.before for word in ("--model", str(job.folder.checkpoint("best")))]
        command = ["-m", "captioning", "average", *models]
        return Command("average", [*command, "--output", str(self.folder.checkpoint("best"))])

    def _fit(self, config: str, options: list[str]) -> Command:
        command = ["-m", "captioning", "fit", "--config", str(_config(config)), "--seed_everything", str(self.seed)]
        command += [*self.study.fit, *options, "--runs", str(self.runs), "--name", self.name]
        command += ["--trainer.logger=false"]
        for job in self.before:
            command += ["--init_from", str(job.folder.checkpoint("best"))]
        last = self.folder.checkpoint("last")
        if last.is_file():  # Training that was complete ends at once.
            return Command("train on from its last checkpoint", [*command, "--ckpt_path", str(last)])
        return Command("train", command)

    def _evaluate(self, evaluation: str, options: list[str]) -> list[str]:
        command = ["-m", "captioning", "evaluate", "--model", str(self.folder.checkpoint("best"))]
        return [*command, *self.study.evaluate, *options, "--json", str(self._written_scores(evaluation))]


def _training(run: Run) -> dict[str, Any]:
    """Return the speed of a training and the means of its statistics in each tenth, as far as they were logged."""
    training: dict[str, Any] = {}
    if (speed := run.captions_per_second) is not None:
        training["captions_per_second"] = round(speed, 1)
        if isinstance(batch := (run.settings.get("data") or {}).get("batch_size"), int):
            training["seconds_per_step"] = round(batch / speed, 4)
    for name in TRAINING_STATISTICS:
        means = run.over_training(f"train/{name}", TENTHS)
        if any(mean is not None for mean in means):
            training[name] = [None if mean is None else float(f"{mean:.4g}") for mean in means]
    return training


def list_state(study: Study, jobs: list[Job]) -> None:
    """Print what is done and what is left, one line per run."""
    if study.features is not None:
        missing = _missing_splits(study)
        left = f"left: extract {', '.join(missing)}" if missing else "there"
        print(f"{'features':32} {left}  ({study.features.output})")
    done = 0
    for job in jobs:
        commands = [command.what for command in job.left()]
        done += not commands
        print(f"{job.name:32} {'left: ' + ', '.join(commands) if commands else 'done'}")
    print(f"{done} of {len(jobs)} runs are done")


def train(study: Study, jobs: list[Job], side_by_side: int) -> None:
    """Run what is left.

    Raises:
        InputError: Data are missing, or runs failed; the other runs are done then.
    """
    waiting = [job for job in jobs if any(job.left())]
    print(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are done", flush=True)
    commands = Commands(side_by_side, _PROGRESS)
    if waiting:
        _prepare(study, waiting, commands)

    def finish(job: Job) -> None:
        folder, scored = job.folder, job.is_scored()
        trains = study.variants[job.variant].config is not None and not scored
        if trains and folder.checkpoints.exists() and not folder.checkpoint("last").is_file():
            raise InputError(
                f"{folder.path}: has no last checkpoint to continue from; delete it to train the run again"
            )
        for earlier in job.before:
            if not scored and not earlier.is_scored():
                raise InputError(f"{job.name}: starts from {earlier.name}, which is not trained and scored")
        for command in job.left():
            best = folder.checkpoint("best")
            if command.evaluation is not None and job.is_scored() and not best.is_file():
                raise InputError(
                    f"{best}: no such file to {command.what}; delete scores.{job.variant}_{job.seed} of {job.file} to "
                    "train it again"
                )
            commands.run(job.name, command.arguments)
            if command.evaluation is not None:
                job.record(command.evaluation)

    outcomes = []
    for stage in sorted({job.stage for job in waiting}):
        outcomes += commands.side_by_side(finish, [job for job in waiting if job.stage == stage])
    failed = [outcome for outcome in outcomes if isinstance(outcome, InputError)]
    if failed:
        raise InputError(f"{len(failed)} of {len(waiting)} runs failed: {'; '.join(map(str, failed))}")


def _prepare(study: Study, jobs: list[Job], commands: Commands) -> None:
    """Check that the data of the jobs' configurations are there, and extract the features that are not.

    Raises:
        InputError: Data are missing; the message says what to do.
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
        where = (_config(variant.config), *overlays)
        if (where, options) not in prepared:
            prepared.add((where, options))
            (source,) = build({"data.source": CaptionSource}, [read_config(path) for path in where], options)
            source.prepare()
    if study.features is not None and _missing_splits(study):
        features = study.features
        command = ["-m", "captioning", "extract", "--config", str(_config(features.config))]
        command += ["--split", *features.splits, "--output", features.output]
        commands.run("features", [*command, *(["--flipped"] if features.flipped else [])])


def _missing_splits(study: Study) -> list[str]:
    from captioning.data.features import flipped_split
    from captioning.files import read_json

    assert study.features is not None
    wanted = [*study.features.splits, *([flipped_split("train")] if study.features.flipped else [])]
    about = {split: Path(study.features.output) / f"{split}.json" for split in wanted}
    contents = {split: read_json(path) for split, path in about.items() if path.is_file()}
    return [s for s in wanted if s not in contents or contents[s]["done"] < len(contents[s]["paths"])]


def report(study: Study, page: Path, runs: Path, measurements: Path, argv: list[str]) -> None:
    """Make the study's tables in a page, and print what could not be tested."""
    from captioning.comparison.study_tables import write_report
    from captioning.provenance import provenance

    origin = provenance(command=f"captioning study {shlex.join(argv)}", seed=0)
    notices = write_report(study, measurements, runs, page, origin)
    print(f"tests    {study.measurements(measurements)}")
    print(f"page     {page}")
    for notice in notices:
        print(f"note: {notice}")


def _config(name: str) -> Path:
    return _configs() / f"{name}.yaml"


def _configs() -> Path:
    """Return the folder of the configurations: that of the clone or, where the package is installed alone, ``configs``.

    Raises:
        InputError: There is none.
    """
    clone = Path(os.path.relpath(REPOSITORY / "configs"))
    folder = clone if (REPOSITORY / "pyproject.toml").is_file() else Path("configs")
    if not folder.is_dir():
        raise InputError(
            f"{folder}: no such folder; outside a clone, a study takes its configurations from configs/ here"
        )
    return folder
