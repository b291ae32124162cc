"""A captions file of COCO's size: how long a split takes to read, and how much memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.memory import resident
from benchmarks.report import Report, Row
from benchmarks.timing import Timing

_ROOT = Path(__file__).resolve().parent.parent

IMAGES, CAPTIONS, WORDS = 118_287, 591_753, 27_000


def write_captions(path: Path, *, images: int = IMAGES, captions: int = CAPTIONS) -> Path:
    """Write a file of COCO 2017's layout: its fields, its caption lengths, and as many frequent and rare words."""
    draw = np.random.default_rng(0)
    ids = np.sort(draw.choice(581_929, images, replace=False)).tolist()
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    spelt = ("".join(letters[draw.integers(26, size=n)]) for n in draw.integers(2, 11, 2 * WORDS))
    words = list(dict.fromkeys(spelt))[:WORDS]
    words[100:WORDS:97] = [f"{word}'s" for word in words[100:WORDS:97]]  # for the tokeniser
    words[50:WORDS:101] = [f"{word}," for word in words[50:WORDS:101]]
    chance = np.arange(10, WORDS + 10) ** -1.673  # about 9,490 words come five times or more, as in COCO
    owners = draw.permutation(np.r_[np.arange(images), draw.integers(images, size=captions - images)]).tolist()
    lengths = np.clip(draw.gamma(20, 0.52, captions).round(), 5, 49).astype(int).tolist()
    drawn = iter(draw.choice(WORDS, int(sum(lengths)), p=chance / chance.sum()).tolist())

    def image_entries() -> Iterator[str]:
        for number in ids:
            name = f"{number:012d}.jpg"
            yield json.dumps(
                {
                    "license": number % 8,
                    "file_name": name,
                    "coco_url": f"http://images.cocodataset.org/train2017/{name}",
                    "height": 480,
                    "width": 640,
                    "date_captured": "2013-11-14 11:18:45",
                    "flickr_url": f"http://farm9.staticflickr.com/8186/{number:010d}_747c2cc3e6_z.jpg",
                    "id": number,
                }
            )

    def annotation_entries() -> Iterator[str]:
        for number, (owner, length) in enumerate(zip(owners, lengths, strict=True)):
            text = " ".join(words[next(drawn)] for _ in range(length)).capitalize() + "."
            yield json.dumps({"image_id": ids[owner], "id": number, "caption": text})

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"info": {"year": 2017}, "images": [')
        file.write(", ".join(image_entries()))
        file.write('], "annotations": [')
        file.write(", ".join(annotation_entries()))
        file.write("]}")
    return path


def measure(*, quick: bool, rounds: int, folder: Path) -> Report:
    """Time reading a training split: from the file, from the cache, and what pycocotools takes, with which ports read.

    Peak memory is that of a process of its own beyond what its imports take.
    """
    images, captions = (200, 1000) if quick else (IMAGES, CAPTIONS)
    root, cache = folder / "coco", folder / "cache"
    path = write_captions(root / "annotations/captions_train2017.json", images=images, captions=captions)
    program = [sys.executable, "-m", "benchmarks.coco"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}

    def run(subject: str) -> dict[str, float]:
        done = subprocess.run(
            [*program, subject, str(path)], cwd=_ROOT, env=environment, check=True, capture_output=True, text=True
        )
        return json.loads(done.stdout.splitlines()[-1])

    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for subject in ("pycocotools", "index", "index_cached"):
            if subject == "index":
                shutil.rmtree(cache, ignore_errors=True)
            found.setdefault(subject, []).append(run(subject))
    timings = {name: Timing(tuple(each["seconds"] for each in rounds_)) for name, rounds_ in found.items()}
    size = f"{captions:,} captions of {images:,} images, {path.stat().st_size / 1e6:.0f} MB"
    rows = [
        Row("index", f"training split of COCO from its file: {size}; port: pycocotools.COCO", timings["index"]),
        Row("index_cached", "the same from the cache, the file's hash checked", timings["index_cached"]),
    ]
    memory = {name: int(max(each["bytes"] for each in rounds_)) for name, rounds_ in found.items()}
    memory["index_common_port"] = memory.pop("pycocotools")
    return Report([row._replace(port=timings["pycocotools"]) for row in rows], peak_memory=memory)


def read(subject: str, path: Path) -> dict[str, float]:
    """Read the file in this process; return seconds, and bytes of memory at the peak beyond what it began with."""
    from pycocotools.coco import COCO

    from captioning.data.coco import CocoSource
    from captioning.tokenizers import tokenize

    tokenize("it's")  # imports nltk
    before = resident("VmHWM")  # getrusage would begin at what the process that started this one had
    start = time.perf_counter()
    if subject == "pycocotools":
        COCO(str(path))
    else:
        CocoSource(str(path.parent.parent)).index("train")
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "bytes": resident("VmHWM") - before}


if __name__ == "__main__":
    print(json.dumps(read(sys.argv[1], Path(sys.argv[2]))))
