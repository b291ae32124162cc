#!/usr/bin/env python
"""Measure where models look: pointing and correctness on the validation images of the pretrained captioner.

Flickr8k's references are judged by the boxes of Flickr30k Entities, COCO's references and the generated captions of
COCO by COCO's masks. Each metric has its baselines: chance, the center, even attention. Intervals are over images.

examples:
  python scripts/looking.py --model pretrained --name captioner
  python scripts/looking.py --model soft.ckpt --name soft --output looking.json
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from captioning.comparison.measures import noun_families
from captioning.data import KarpathySource
from captioning.errors import exits_on_input_error
from captioning.evaluation.evaluator import evaluate_model
from captioning.files import read_json, write_json
from captioning.inference import ImageCaptioner, load
from captioning.metrics.arrays import percentage
from captioning.metrics.resampling import differences, intervals
from captioning.provenance import provenance

DATA = Path("data")
SOURCES = {
    "Flickr8k, 1,000 images": KarpathySource(
        str(DATA / "flickr8k/dataset_flickr8k.json"),
        str(DATA / "flickr8k/images"),
        entities=str(DATA / "flickr30k_entities"),
    ),
    "COCO, 100 images": KarpathySource(
        str(DATA / "pretrained/coco.json"),
        str(DATA),
        instances=[str(DATA / f"coco/annotations/instances_{split}2014.json") for split in ("train", "val")],
    ),
}
"""The validation images, with the regions of what their captions name."""
MEASUREMENT = Path("docs/measurements/looking.json")


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint, an exported folder, or pretrained")
    parser.add_argument("--name", required=True, help="key of the results in the output file")
    parser.add_argument("--output", type=Path, default=MEASUREMENT, help="(default: %(default)s)")
    parser.add_argument("--limit", type=int, help="number of images of each set, the first")
    args = parser.parse_args(argv)
    captioner = load(args.model)
    sets = {}
    for title, source in SOURCES.items():
        evaluator = evaluate_model(
            captioner.model, captioner.vocabulary, source, captioner.options, split="val", limit_images=args.limit
        )
        metrics, records = evaluator.compute_metrics(), evaluator.captioned_images
        sets[title] = {name: round(metrics[name], 2) for name in ("bleu4", "cider_d", "nll")} | looking_metrics(records)
    index = SOURCES["COCO, 100 images"].index("val")
    paths = [index.image_path(row) for row in range(len(index))][: args.limit]
    origin = provenance(command=f"python scripts/looking.py --model MODEL --name {args.name}", seed=None)
    entry = {"unit": "percent", "sets": sets, "first_word": first_word_border(captioner, paths), **origin}
    content = read_json(args.output) if args.output.exists() else {}
    write_json(args.output, content | {args.name: entry})
    print(json.dumps(entry, indent=1))


def looking_metrics(records: Any) -> dict[str, Any]:
    """Return the metrics of attention at nouns and phrases with intervals, and pointing minus the center's pointing."""
    families = noun_families({"": records})
    counts_by_metric = {name: family.counts[""] for family in families for name in family.metrics}
    facts: dict[str, Any] = {}
    for name, counts in counts_by_metric.items():
        (interval,) = intervals(counts, percentage)
        value_and_bounds = {end: round(number, 2) for end, number in vars(interval).items()}
        facts[name] = value_and_bounds | {"nouns": int(counts[:, 1].sum())}
    for kind in ("", "reference_"):
        if f"{kind}pointing_accuracy" in counts_by_metric:
            centre, pointing = counts_by_metric[f"{kind}pointing_centre"], counts_by_metric[f"{kind}pointing_accuracy"]
            (difference,) = differences(centre, pointing, percentage)
            interval = difference.interval
            numbers = {"value": interval.value, "low": interval.low, "high": interval.high, "p": difference.p_value}
            facts[f"{kind}above_the_centre"] = {name: round(float(value), 3) for name, value in numbers.items()}
    return facts


def first_word_border(captioner: ImageCaptioner, paths: list[Path]) -> dict[str, Any]:
    """Return the percentage of captions whose first word is strongest in a border cell, and that of cells there."""
    is_border = []
    for caption in captioner.stream(paths):
        height, width = caption.grid_size
        row, column = divmod(int(np.argmax(caption.alphas[0])), width)
        is_border.append(row in (0, height - 1) or column in (0, width - 1))
    inner = (height - 2) * (width - 2)
    cells = 100 * (1 - inner / (height * width))
    return {"images": len(is_border), "border": 100 * float(np.mean(is_border)), "border_cells": round(cells, 2)}


if __name__ == "__main__":
    main(sys.argv[1:])
