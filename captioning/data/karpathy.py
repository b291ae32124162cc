"""Karpathy's split files: dataset_coco.json, dataset_flickr8k.json and dataset_flickr30k.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from captioning.data.index_cache import cached_index
from captioning.data.records import CaptionIndex, CaptionSource, ImageEntry, check_split, image_name
from captioning.errors import InputError
from captioning.tokenizers import PennTreebank, Tokenizer


class KarpathySource(CaptionSource):
    """A data set split and tokenised as in Karpathy & Fei-Fei 2015, which most published numbers use.

    The file's own tokens are taken: lower case, without punctuation. With another tokenizer than the default one they
    are made of the sentences' ``raw`` texts. ``restval``, COCO's validation images that he
    put into neither the validation nor the test split, belongs to the training split. An image's number is its
    ``cocoid``, or its ``imgid`` if it has none; its file is ``filename``, below ``filepath`` if given (COCO:
    train2014 or val2014).

    Args:
        json_path: the split file.
        image_dir: the folder of the images; for COCO the folder that holds ``train2014`` and ``val2014``.
        allow_outside: let the file name images by absolute paths and by "..", anywhere on this machine.
    """

    def __init__(self, json_path: str, image_dir: str, *, allow_outside: bool = False) -> None:
        self.json_path = Path(json_path)
        self.image_dir = Path(image_dir)
        self.allow_outside = allow_outside

    @property
    def tokens(self) -> str:
        if isinstance(self.tokenizer, PennTreebank):
            return "the split file's own, lower case, without punctuation"
        return super().tokens

    def prepare(self) -> None:
        """Check that the split file is there.

        Raises:
            InputError: it is missing.
        """
        if not self.json_path.is_file():
            raise InputError(f"{self.json_path}: missing; {self._remedy()}")

    def index(self, split: str) -> CaptionIndex:
        check_split(split)
        self.prepare()
        options = (str(self.json_path), split, self.allow_outside)
        return cached_index(self.json_path, options, self.image_dir, lambda: self._index(split), self.tokenizer)

    def _index(self, split: str) -> CaptionIndex:
        try:
            images = json.loads(self.json_path.read_bytes())["images"]
        except (ValueError, KeyError, TypeError, RecursionError):
            images = None
        if not isinstance(images, list):
            raise InputError(f'{self.json_path}: not a split file, expected {{"images": [...]}}')
        try:
            entries = list(_entries(images, split, self.allow_outside, self.tokenizer))
        except InputError as error:
            raise InputError(f"{self.json_path}: {error}") from error
        if not entries:
            there = sorted({str(image.get("split")) for image in images})
            raise InputError(f"{self.json_path}: has no {split} split, only {', '.join(there) or 'no image at all'}")
        return CaptionIndex.build(self.image_dir, entries, origin=self.json_path)

    def _remedy(self) -> str:
        name = self.json_path.stem.removeprefix("dataset_")
        if self.json_path.name in {f"dataset_{known}.json" for known in ("coco", "flickr8k", "flickr30k")}:
            option = " --karpathy" if name == "coco" else ""
            return f"run python scripts/prepare_data.py {name}{option} --root {self.json_path.parent}"
        return "see data/README.md"


def _entries(
    images: list[dict[str, Any]], split: str, allow_outside: bool, tokenizer: Tokenizer
) -> Iterator[ImageEntry]:
    wanted = ("train", "restval") if split == "train" else (split,)  # no set: what the file says may have no hash
    for number, image in enumerate(images):
        if not isinstance(image, dict):
            raise InputError(f"entry {number} of images is not an object")
        if image.get("split") not in wanted:
            continue
        image_id = image.get("cocoid", image.get("imgid"))
        if not isinstance(image_id, int):
            raise InputError(f"entry {number} of images has neither cocoid nor imgid")
        folder, file = image.get("filepath", ""), image.get("filename")
        if not isinstance(folder, str) or not isinstance(file, str) or not file:
            raise InputError(f"image {image_id} has no file")
        try:
            captions = [_words(sentence, tokenizer) for sentence in image.get("sentences", ())]
        except (KeyError, TypeError, AttributeError):
            field = "tokens" if isinstance(tokenizer, PennTreebank) else "its raw text"
            raise InputError(f"image {image_id} has a sentence without {field}") from None
        name = image_name(str(Path(folder, file)), allow_outside=allow_outside, where=f"image {image_id}")
        yield ImageEntry(image_id, name, captions)


def _words(sentence: dict[str, Any], tokenizer: Tokenizer) -> str:
    if isinstance(tokenizer, PennTreebank):
        if not isinstance(sentence["tokens"], list):
            raise TypeError  # a text would be taken letter by letter
        return " ".join(sentence["tokens"])
    return " ".join(tokenizer.tokenize(sentence["raw"]))
