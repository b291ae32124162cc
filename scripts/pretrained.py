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

from commands import Commands
from measurements import measurement_of

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


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default="runs", help="folder of the runs (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="run these stages, finished or not")
    parser.add_argument("--dry_run", action="store_true", help="print the commands that are left, and run none")
    args = parser.parse_args(argv)
    stages = recipe(args.runs)
    if unknown := [name for name in args.only or () if name not in stages]:
        raise InputError(f"--only: there is no stage {unknown[0]!r}; one of {', '.join(stages)}")
    commands, pretrained = Commands(1), RunFolder(args.runs / _MEAN)
    for name in args.only or stages:
        done, command = pretrained.path / f"{name}.done", stages[name]
        if done.exists() and not args.only:
            continue
        if args.dry_run:
            print(f"{name}  {f'$ captioning {shlex.join(command)}' if command else f'captions of {EXPORTED}'}")
            continue
        if command:
            commands.run(name, command)
        else:
            check(pretrained.checkpoint("best"), EXPORTED, MEASUREMENT)
        if name == "score":
            write_json(MEASUREMENT, measurement_of(pretrained.path, command, seed=1))
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()


def recipe(runs: Path) -> dict[str, list[str]]:
    """Return the commands that make the captioner, in their order; that of the check is empty."""
    best = {name: str(RunFolder(runs / name).checkpoint("best")) for name in (_FIRST, _TUNED, _CRITICAL, _MEAN)}
    features, tuned_features = "data/flickr8k/pretrained", "data/flickr8k/pretrained_tuned"
    extract = ["extract", "--config", str(CONFIG), "--split", "train", "--split", "val", "--flipped"]

    def fit(run: str, *options: str) -> list[str]:
        last = RunFolder(runs / run).checkpoint("last")
        resumed = ["--ckpt_path", str(last)] if last.is_file() else []
        placed = ["--runs", str(runs), "--name", run, "--trainer.logger=false"]
        return ["fit", "--config", str(CONFIG), *options, *placed, *resumed]

    def second(overlay: str, run: str) -> list[str]:
        return ["--config", str(REPOSITORY / f"configs/overlays/{overlay}.yaml"), "--init_from", best[run]]

    return {
        "features": [*extract, "--output", features],
        "first": fit(_FIRST, "--data.features", features),
        "tuned": fit(_TUNED, *second("fine_tune_mobilenet", _FIRST), "--checkpoint.monitor", "val/cider_d"),
        "tuned_features": [*extract, "--init_from", best[_TUNED], "--output", tuned_features],
        "critical": fit(
            _CRITICAL,
            *second("self_critical", _TUNED),
            *("--data.features", tuned_features, "--trainer.max_epochs", "8"),
            *("--model.search.length_normalization", "0.7"),
        ),
        "average": ["average", "--model", best[_TUNED], "--model", best[_CRITICAL], "--output", best[_MEAN]],
        "score": ["test", "--ckpt_path", best[_MEAN], "--data.test_split=val", "--data.features", tuned_features],
        "export": [
            *("export", "--model", best[_MEAN], "--output", str(EXPORTED), "--dtype", "float16"),
            *("--license", "other", "--notes", str(CONFIG.with_suffix(".md"))),
        ],
        "check": [],
    }


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
        **provenance(command="python scripts/pretrained.py --only check", seed=None),
    }
    write_json(measurement, read_json(measurement) | {"export": export})
    print(f"{equal} of {len(images)} captions are equal ({export['percent']} %), written to {measurement}")
    if equal < 0.99 * len(images):
        raise InputError(f"{folder}: fewer than 99 % of its captions are those of {checkpoint}")


if __name__ == "__main__":
    main(sys.argv[1:])
