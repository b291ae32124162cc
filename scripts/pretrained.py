#!/usr/bin/env python
"""Make the pretrained captioner again: train its stages, score it, export it into the package, and check the export.

A stage that was finished is skipped, as RUNS/pretrained/STAGE.done says; an interrupted training is resumed. The images
and the weights of MobileNetV1 must be there: `captioning prepare flickr8k` and `captioning prepare weights`.

examples:
  python scripts/pretrained.py
  python scripts/pretrained.py --dry_run
  python scripts/pretrained.py --only score export check
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path
from typing import NamedTuple

from commands import Commands

from captioning.errors import InputError, exits_on_input_error
from captioning.files import read_json, write_json
from captioning.provenance import provenance
from captioning.run_folder import RunFolder

REPOSITORY = Path(os.path.relpath(Path(__file__).resolve().parent.parent))
CONFIG = REPOSITORY / "configs/flickr8k_pretrained.yaml"
EXPORTED = REPOSITORY / "captioning/pretrained/flickr8k_mobilenet"
MEASUREMENT = REPOSITORY / "docs/measurements/pretrained.json"
TIMED = 50
"""Images that are captioned one after the other to measure the time."""

_FIRST, _TUNED, _CRITICAL, _MEAN = "pretrained_first", "pretrained_tuned", "pretrained_self_critical", "pretrained"
_CHECK = "check"
_PROGRESS = "run folder|generating|epoch|best checkpoint|brevity penalty|written to"


class Stage(NamedTuple):
    """A command of `captioning`, and the checkpoint from which it resumes if it is a training."""

    name: str
    arguments: list[str]
    last: Path | None = None

    def command(self) -> list[str]:
        resumed = self.last is not None and self.last.is_file()
        return [*self.arguments, *(["--ckpt_path", str(self.last)] if resumed else [])]


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    args, stages = _parse(sys.argv[1:] if argv is None else argv)
    commands = Commands(1, _PROGRESS)
    pretrained = RunFolder(args.runs / _MEAN)
    for name in args.only or [*stages, _CHECK]:
        done = pretrained.path / f"{name}.done"
        if done.exists() and not args.only:
            continue
        if args.dry_run:
            what = f"$ captioning {shlex.join(stages[name].command())}" if name in stages else f"captions of {EXPORTED}"
            print(f"{name}  {what}")
            continue
        if name in stages:
            commands.run(name, stages[name].command())
        else:
            check(pretrained.checkpoint("best"), EXPORTED, MEASUREMENT)
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()


def _parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Stage]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs (default: %(default)s)")
    parser.add_argument(
        "--only", nargs="+", metavar="STAGE", help="run these stages, whether they were finished or not"
    )
    parser.add_argument("--dry_run", action="store_true", help="print the commands that are left, and run none")
    args = parser.parse_args(argv)
    stages = {stage.name: stage for stage in recipe(args.runs)}
    if unknown := [name for name in args.only or () if name not in (*stages, _CHECK)]:
        raise InputError(f"--only: there is no stage {unknown[0]!r}; one of {', '.join([*stages, _CHECK])}")
    return args, stages


def recipe(runs: Path) -> list[Stage]:
    """Return the commands that make the captioner, in their order."""
    best = {name: str(RunFolder(runs / name).checkpoint("best")) for name in (_FIRST, _TUNED, _CRITICAL, _MEAN)}
    features, tuned_features = "data/flickr8k/pretrained", "data/flickr8k/pretrained_tuned"
    evaluate = ["evaluate", "--model", best[_MEAN]]
    export = ["export", "--model", best[_MEAN], "--output", str(EXPORTED)]
    extract = ["extract", "--config", str(CONFIG), "--split", "train", "val", "--flipped"]

    def fit(stage: str, run: str, *options: str) -> Stage:
        arguments = ["fit", "--config", str(CONFIG), *options, "--runs", str(runs), "--name", run]
        return Stage(stage, [*arguments, "--trainer.logger=false"], RunFolder(runs / run).checkpoint("last"))

    def second(overlay: str, run: str) -> list[str]:
        return ["--config", str(REPOSITORY / f"configs/overlays/{overlay}.yaml"), "--init_from", best[run]]

    return [
        Stage("features", [*extract, "--output", features]),
        fit("first", _FIRST, "--data.features", features),
        fit("tuned", _TUNED, *second("fine_tune_mobilenet", _FIRST), "--checkpoint.monitor", "val/cider_d"),
        Stage("tuned_features", [*extract, "--init_from", best[_TUNED], "--output", tuned_features]),
        fit(
            "critical",
            _CRITICAL,
            *second("self_critical", _TUNED),
            *("--data.features", tuned_features, "--trainer.max_epochs", "8"),
            *("--model.search.length_normalization", "0.7"),
        ),
        Stage("average", ["average", "--model", best[_TUNED], "--model", best[_CRITICAL], "--output", best[_MEAN]]),
        Stage(
            "score",
            [*evaluate, "--split", "val", "--data.features", tuned_features, "--json", str(MEASUREMENT)],
        ),
        Stage(
            "export",
            [*export, "--dtype", "float16", "--license", "other", "--notes", str(CONFIG.with_suffix(".md"))],
        ),
    ]


def check(checkpoint: Path, folder: Path, measurement: Path) -> None:
    """Caption the validation images with a checkpoint and its export, and note in a measurement how many agree.

    Raises:
        InputError: Fewer than 99 % of the captions are equal.
    """
    from captioning.cli.build import build
    from captioning.data import CaptionSource
    from captioning.inference import load

    trained, exported = load(checkpoint), load(folder)
    (source,) = build({"data.source": CaptionSource}, [trained.settings])
    index = source.index("val")
    images = [index.image_path(number) for number in range(len(index))]
    pairs = zip(trained.stream(images), exported.stream(images), strict=True)
    equal = sum(one.words == other.words for one, other in pairs)
    started = time.perf_counter()
    for image in images[:TIMED]:
        exported.caption(image)
    seconds = time.perf_counter() - started
    export = {
        "images": len(images),
        "equal_captions": equal,
        "percent": round(100 * equal / len(images), 2),
        "megabytes": round(sum(file.stat().st_size for file in folder.iterdir()) / 1e6, 2),
        "milliseconds_per_image": round(1000 * seconds / len(images[:TIMED]), 1),
        **provenance(command=f"python scripts/pretrained.py --only {_CHECK}", seed=None),
    }
    write_json(measurement, read_json(measurement) | {"export": export})
    print(f"{equal} of {len(images)} captions are equal ({export['percent']} %), written to {measurement}")
    if equal < 0.99 * len(images):
        raise InputError(f"{folder}: fewer than 99 % of its captions are those of {checkpoint}")


if __name__ == "__main__":
    main()
