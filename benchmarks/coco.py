"""A captions file of COCO's size: how long a split takes to read, and how much memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

IMAGES, CAPTIONS, WORDS = 118_287, 591_753, 24_000


def write_captions(path: Path, *, images: int = IMAGES, captions: int = CAPTIONS) -> Path:
    """Write a file of COCO 2017's layout: its fields, its caption lengths, and words as rare as words are (Zipf)."""
    draw = np.random.default_rng(0)
    ids = np.sort(draw.choice(581_929, images, replace=False)).tolist()
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(letters[draw.integers(26, size=n)]) for n in draw.integers(1, 10, WORDS)]
    words[100:WORDS:97] = [f"{word}'s" for word in words[100:WORDS:97]]  # for the tokeniser
    words[50:WORDS:101] = [f"{word}," for word in words[50:WORDS:101]]
    chance = 1 / np.arange(10, WORDS + 10)
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
