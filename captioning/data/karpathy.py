"""Karpathy's split files: dataset_coco.json, dataset_flickr8k.json and dataset_flickr30k.json."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from captioning.data.records import CaptionIndex, CaptionSource, ImageEntry, read_annotations
from captioning.errors import InputError
from captioning.tokenizers import PennTreebank


class KarpathySource(CaptionSource):
    """A data set split and tokenised as in Karpathy & Fei-Fei 2015, which most published numbers use.

    Captions are the file's own tokens, made lower case and free of punctuation where they are not. A tokenizer other
    than the default one gets the ``raw`` texts of the sentences instead. ``restval``, the validation images of COCO
    that are in neither his validation nor his test split, belongs to the training split. An image's number is its
    ``cocoid``, or its ``imgid`` if it has none; its file is ``filename``, below ``filepath`` if given (COCO: train2014
    or val2014).

    Args:
        json_path: The split file.
        image_dir: The folder of the images; for COCO the folder that holds ``train2014`` and ``val2014``.
    """

    def __init__(self, json_path: str, image_dir: str) -> None:
        self.json_path, self.image_dir = Path(json_path), Path(image_dir)

    def annotations(self) -> list[Path]:
        return [self.json_path]

    def remedy(self) -> str:
        name = self.json_path.stem.removeprefix("dataset_")
        if name in ("coco", "flickr8k", "flickr30k"):
            root = shlex.quote(str(self.json_path.parent))
            return f"run captioning prepare {name}{' --karpathy' * (name == 'coco')} --root {root}"
        return super().remedy()

    def index(self, split: str) -> CaptionIndex:
        images = read_annotations(self.json_path, _SplitFile, "split file", self.remedy()).images
        splits = ("train", "restval") if split == "train" else (split,)
        entries = [self._entry(image) for image in images if image.split in splits]
        if not entries:
            names = ", ".join(sorted({image.split for image in images}))
            raise InputError(f"{self.json_path}: has no {split} split, only {names}")
        return CaptionIndex.build(self.image_dir, entries, origin=self.json_path)

    def _entry(self, image: _Image) -> ImageEntry:
        image_id = image.imgid if image.cocoid is None else image.cocoid
        if image_id is None:
            raise InputError(f"{self.json_path}: {image.filename} has neither cocoid nor imgid")
        own = isinstance(self.tokenizer, PennTreebank)
        texts = [" ".join(one.tokens) if own else one.raw for one in image.sentences]
        captions = [" ".join(self.tokenizer.tokenize(text)) for text in texts]
        return ImageEntry(image_id, str(Path(image.filepath, image.filename)), captions)


class _Sentence(msgspec.Struct):
    tokens: list[str] = []
    raw: str = ""


class _Image(msgspec.Struct):
    split: str
    filename: str
    filepath: str = ""
    cocoid: int | None = None
    imgid: int | None = None
    sentences: list[_Sentence] = []


class _SplitFile(msgspec.Struct):
    images: list[_Image]
