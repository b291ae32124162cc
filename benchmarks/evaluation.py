"""How long a command takes that scores a file of captions, as many as COCO's validation split has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from benchmarks.coco import write_captions
from benchmarks.report import Report, Row
from benchmarks.timing import interleave

_ROOT = Path(__file__).resolve().parent.parent


def measure(*, quick: bool, rounds: int, folder: Path) -> Report:
    """Time ``scripts/evaluate.py --captions``, from being typed to the scores with their intervals, without Java."""
    images = 40 if quick else 5000
    references = write_captions(folder / "evaluation/references.json", images=images, captions=5 * images)
    captions = write_results(references, folder / "evaluation/results.json")
    command = [sys.executable, "scripts/evaluate.py", "--captions", str(captions), "--references", str(references)]
    environment = os.environ | {"CAPTIONING_JAVA": "off"}
    run = partial(subprocess.run, command, cwd=_ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    timings = interleave({"ours": partial(run, stderr=subprocess.PIPE)}, rounds=rounds, device=torch.device("cpu"))
    what = f"evaluate.py --captions: BLEU, ROUGE-L, CIDEr-D of {images:,} images with five references, and intervals"
    return Report([Row("evaluate_captions", what, timings["ours"], images=images)])


def write_results(references: Path, path: Path) -> Path:
    """Write a caption of every image: a reference of its own, or for every other image a reference of the next one."""
    of_image: dict[int, str] = {}
    for annotation in json.loads(references.read_text(encoding="utf-8"))["annotations"]:
        of_image.setdefault(annotation["image_id"], annotation["caption"])
    ids = sorted(of_image)
    said = [of_image[ids[(number + number % 2) % len(ids)]] for number in range(len(ids))]
    results = [{"image_id": image_id, "caption": caption} for image_id, caption in zip(ids, said, strict=True)]
    path.write_text(json.dumps(results), encoding="utf-8")
    return path
