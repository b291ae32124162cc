#!/usr/bin/env python
"""Make the pretrained captioner again: join its data, train its stages, choose among them, export the best, check it.

A stage with a file RUNS/pretrained/STAGE.done is skipped, and an interrupted training is resumed. The script needs
Flickr8k, Flickr30k, COCO with Karpathy's split and the encoder's weights: `captioning prepare` gets them.

examples:
  python scripts/pretrained.py
  python scripts/pretrained.py --dry_run
  python scripts/pretrained.py --only score export check
"""

import argparse
import json
import os
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

from caption_faults import FaultRules
from commands import Commands
from looking import SOURCES, looking_metrics

from captioning.errors import InputError, exits_on_input_error
from captioning.files import read_json, write_json, write_text
from captioning.metrics.table import TITLES
from captioning.provenance import provenance
from captioning.run_folder import RunFolder
from captioning.settings import command_line

REPOSITORY = Path(os.path.relpath(Path(__file__).resolve().parent.parent))
RECIPE = REPOSITORY / "configs/pretrained"
EXPORTED = REPOSITORY / "captioning/pretrained/photos_lite2"
MEASUREMENT = REPOSITORY / "docs/measurements/pretrained.json"
DATA = Path("data")
JOINED, COCO = DATA / "pretrained/dataset.json", DATA / "pretrained/coco.json"
TIMED_IMAGES = 50
"""Number of images that are captioned one at a time to measure the time of one."""

_STAGES = ("first", "tuned", "taught", "self_critical", "mean", "guided", "guided_longer", "guided_mean")
_FIRST, _TUNED, _TAUGHT, _CRITICAL, _MEAN, _GUIDED, _LONGER, _GUIDED_MEAN = (f"pretrained_{stage}" for stage in _STAGES)
_BEST = "pretrained"
FRACTIONS = (0.15, 0.35, 0.5)
"""Weights of the tuned, the taught and the self-critical stage in their mean, chosen on the validation images."""

_STRONGER_GUIDANCE = json.dumps(
    [
        {"class_path": "captioning.objective.EvidenceGuidance", "init_args": {"weight": 0.5}},
        {"class_path": "captioning.objective.RegionGuidance", "init_args": {"weight": 20.0}},
    ]
)


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default="runs", help="folder of the runs (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="run these stages, finished or not")
    parser.add_argument("--dry_run", action="store_true", help="print the commands that are left, and run none")
    args = parser.parse_args(command_line(argv))
    stages, folder = recipe(args.runs), args.runs / _BEST
    if unknown := [name for name in args.only or () if name not in stages]:
        raise InputError(f"--only: there is no stage {unknown[0]!r}; one of {', '.join(stages)}")
    functions = {"data": lambda _: join(JOINED, COCO), "score": score, "check": check}
    for name in args.only or stages:
        done, command = folder / f"{name}.done", stages[name]
        if done.exists() and not args.only:
            continue
        if args.dry_run:
            print(f"{name}  {f'$ captioning {shlex.join(command)}' if command else '(in this script)'}")
            continue
        started = time.perf_counter()
        if command:
            if "--name" in command:  # a run that may have been killed before its first checkpoint
                RunFolder(args.runs / command[command.index("--name") + 1]).release()
            Commands(1).run(name, command)
        else:
            functions[name](args.runs)
        done.parent.mkdir(parents=True, exist_ok=True)
        write_text(done, f"{(time.perf_counter() - started) / 3600:.2f} hours\n")


def recipe(runs: Path) -> dict[str, list[str]]:
    """Return the stages that make the captioner, in order, each with its command; [] for a function of this script."""
    names = (*(f"pretrained_{stage}" for stage in _STAGES), _BEST)
    best = {name: str(RunFolder(runs / name).checkpoint("best")) for name in names}
    first, features, tuned_features = str(RECIPE / "first.yaml"), "data/pretrained/features", "data/pretrained/tuned"
    extract = ["extract", "--config", first, "--split", "train", "--split", "val", "--flipped"]

    def fit(run: str, *options: str) -> list[str]:
        last = RunFolder(runs / run).checkpoint("last")
        resumed = ["--ckpt_path", str(last)] if last.is_file() else []
        return [
            *("fit", "--config", first, *options),
            *("--runs", str(runs), "--name", run, "--trainer.logger=false", *resumed),
        ]

    def after(run: str, stage: str) -> list[str]:
        return ["--config", str(RECIPE / f"{stage}.yaml"), "--init_from", best[run]]

    return {
        "data": [],
        "features": [*extract, "--output", features],
        "first": fit(_FIRST, "--data.features", features),
        "tuned": fit(_TUNED, *after(_FIRST, "tuned")),
        "tuned_features": [*extract, "--init_from", best[_TUNED], "--output", tuned_features],
        "taught": fit(_TAUGHT, *after(_TUNED, "taught"), "--data.features", tuned_features),
        "critical": fit(_CRITICAL, *after(_TAUGHT, "self_critical"), "--data.features", tuned_features),
        "average": [
            *("average", "--output", best[_MEAN], "--model", best[_TUNED], best[_TAUGHT], best[_CRITICAL]),
            *("--fraction", *map(str, FRACTIONS)),
        ],
        "guided": fit(_GUIDED, *after(_MEAN, "guided"), "--data.features", tuned_features),
        "guided_longer": fit(
            _LONGER,
            *(*after(_GUIDED, "guided"), "--data.features", tuned_features, "--seed_everything", "3"),
            *("--model.objective.init_args.likelihood.init_args.guidance", _STRONGER_GUIDANCE),
        ),
        "average_guided": ["average", "--output", best[_GUIDED_MEAN], "--model", best[_GUIDED], best[_LONGER]],
        "score": [],
        "export": [
            *("export", "--model", best[_BEST], "--output", str(EXPORTED), "--dtype", "float16"),
            *("--license", "other", "--notes", str(runs / _BEST / "card.md")),
        ],
        "check": [],
    }


def join(joined: Path, coco: Path) -> None:
    """Write a split file of the photos of Flickr8k and ``photographs.txt``, and one of COCO's validation photos.

    Raises:
        InputError: A split file is missing, or lacks a photo of the list.
    """
    flickr8k = _images("flickr8k", "images")
    images = [{**image, "dataset": "flickr8k"} for image in flickr8k if image["split"] != "test"]
    wanted = [line.split() for line in (RECIPE / "photographs.txt").read_text().splitlines() if line[0] != "#"]
    for name, folder, key in (("coco", "", "cocoid"), ("flickr30k", "images", "filename")):
        known = {str(image[key]): image for image in _images(name, folder)}
        numbers = [(split, number) for split, dataset, number in wanted if dataset == name]
        if lacking := [number for _, number in numbers if number not in known]:
            raise InputError(f"dataset_{name}.json lacks {len(lacking)} of the photos, such as {lacking[0]}")
        images += [{**known[number], "split": split, "dataset": name} for split, number in numbers]
    for number, image in enumerate(images):
        image |= {"imgid": number, "cocoid": number}  # unique over the data sets
    write_json(joined, {"images": images}, indent=None)
    write_json(coco, {"images": [i for i in images if (i["dataset"], i["split"]) == ("coco", "val")]}, indent=None)
    captions = sum(len(image["sentences"]) for image in images)
    print(f"{joined}: {len(images):,} images, {captions:,} captions")


def _images(name: str, folder: str) -> list[dict[str, Any]]:
    """Return the images of Karpathy's file of a data set, with paths from the folder of all data sets."""
    content = read_json(DATA / name / f"dataset_{name}.json")
    return [{**image, "filepath": str(Path(name, folder, image.get("filepath", "")))} for image in content["images"]]


def score(runs: Path) -> None:
    """Score the stages on both validation sets. The best stage has the highest mean of both CIDEr-D; copy its model."""
    from captioning.data import KarpathySource
    from captioning.evaluation.evaluator import evaluate_model
    from captioning.inference import load
    from captioning.metrics.resampling import intervals
    from captioning.metrics.table import UNIT, family_counts

    training = KarpathySource(str(JOINED), str(DATA)).index("train").captions
    rules, measured = FaultRules(caption.split() for caption in training), {}
    stages = {name: RunFolder(runs / name).checkpoint("best") for name in (f"pretrained_{stage}" for stage in _STAGES)}
    for name, checkpoint in stages.items():
        if not checkpoint.is_file():
            print(f"{name}: has no checkpoint, and is left out")
            continue
        captioner = load(checkpoint)
        captions, sets = [], {}
        for title, source in SOURCES.items():
            model, vocabulary, search = captioner.model, captioner.vocabulary, captioner.options
            evaluator = evaluate_model(model, vocabulary, source, search, split="val")
            values, records = evaluator.compute_metrics(), evaluator.captioned_images
            captions += [record.words for record in records]
            sets[title] = {"nll": round(values["nll"], 4), **looking_metrics(records)}
            for family, counts in family_counts([r.words for r in records], [r.reference_words for r in records]):
                for metric, interval in zip(family.metrics, intervals(counts, family.statistic), strict=True):
                    sets[title][metric] = {end: round(number, 2) for end, number in vars(interval).items()}
        measured[name] = {"sets": sets, "sentences": rules.faults(captions)}
        print(f"{name}  {json.dumps(measured[name])}")
    cider_sums = {name: sum(s["cider_d"]["value"] for s in stage["sets"].values()) for name, stage in measured.items()}
    chosen = max(cider_sums, key=cider_sums.__getitem__)
    best = RunFolder(runs / _BEST).checkpoint("best")
    best.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(RunFolder(runs / chosen).checkpoint("best"), best)
    hours = {path.stem: path.read_text().split()[0] for path in sorted((runs / _BEST).glob("*.done"))}
    facts = {"chosen": chosen, "stages": measured, "unit": f"{UNIT}; sentences in percent of captions"}
    origin = provenance(command="python scripts/pretrained.py --only score", seed=1)
    write_json(MEASUREMENT, facts | {"hours": hours, "search": vars(captioner.options), **origin})
    write_text(runs / _BEST / "card.md", _card(measured[chosen]["sets"]))


def _card(sets: dict[str, Any]) -> str:
    """Return the captioner's card with the metrics of both validation sets."""
    lines = ["| metric | " + " | ".join(sets) + " |", "| --- |" + " --- |" * len(sets)]
    words = ("bleu1", "bleu4", "rouge_l", "cider_d", "meteor")
    pointing = (
        "pointing_accuracy",
        "pointing_chance",
        "pointing_centre",
        "attention_correctness",
        "correctness_uniform",
    )
    for metric in (*words, *pointing, *(f"reference_{name}" for name in pointing)):
        intervals = [metrics.get(metric) for metrics in sets.values()]
        texts = ["-" if i is None else f"{i['value']:.2f} ({i['low']:.2f} to {i['high']:.2f})" for i in intervals]
        lines.append(f"| {TITLES[metric]} | {' | '.join(texts)} |")
    how = "Validation images, on which all choices were made; in brackets a 95 % interval over images."
    return (RECIPE / "card.md").read_text(encoding="utf-8") + f"\n## Metrics\n\n{how}\n\n" + "\n".join(lines) + "\n"


def check(runs: Path) -> None:
    """Caption the validation images with the checkpoint and its export, and record how many captions are equal.

    Raises:
        InputError: Fewer than 99 % of the captions are equal.
    """
    from captioning.data import KarpathySource
    from captioning.inference import load

    trained, exported = load(RunFolder(runs / _BEST).checkpoint("best")), load(EXPORTED)
    index = KarpathySource(str(JOINED), str(DATA)).index("val")
    images = [index.image_path(number) for number in range(len(index))]
    pairs = zip(trained.stream(images), exported.stream(images), strict=True)
    equal = sum(one.words == other.words for one, other in pairs)
    started = time.perf_counter()
    for image in images[:TIMED_IMAGES]:
        exported.caption(image)
    seconds = time.perf_counter() - started
    export = {
        "images": len(images),
        "equal_captions": equal,
        "percent": round(100 * equal / len(images), 2),
        "megabytes": round(sum(file.stat().st_size for file in EXPORTED.iterdir()) / 1e6, 2),
        "milliseconds_per_image": round(1000 * seconds / len(images[:TIMED_IMAGES]), 1),
        **provenance(command="python scripts/pretrained.py --only check", seed=None),
    }
    write_json(MEASUREMENT, read_json(MEASUREMENT) | {"export": export})
    print(f"{equal} of {len(images)} captions are equal ({export['percent']} %), written to {MEASUREMENT}")
    if equal < 0.99 * len(images):
        raise InputError(f"{EXPORTED}: fewer than 99 % of its captions are those of the checkpoint")


if __name__ == "__main__":
    main()
