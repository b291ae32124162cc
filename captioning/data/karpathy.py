"""Karpathy's split files: dataset_coco.json, dataset_flickr8k.json and dataset_flickr30k.json."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from captioning.data.coco import instance_lookup
from captioning.data.coco_nouns import synonyms
from captioning.data.entities import Entities
from captioning.data.records import (
    CaptionIndex,
    CaptionSource,
    ImageEntry,
    ObjectLookup,
    PhraseLookup,
    read_annotations,
)
from captioning.errors import InputError
from captioning.tokenizers import PennTreebank


class KarpathySource(CaptionSource):
    """A data set split and tokenized as in Karpathy & Fei-Fei 2015, which most published numbers use.

    Captions are the file's tokens, in lower case and without punctuation. A tokenizer other than the default gets the
    ``raw`` sentences instead. ``restval``, COCO's validation images outside Karpathy's validation and test splits,
    belongs to the training split. An image's id is its ``cocoid``, or else its ``imgid``. Its file is ``filename``,
    below ``filepath`` if given (COCO: train2014 or val2014).

    Args:
        json_path: The split file.
        image_dir: The folder of the images; for COCO the folder that holds ``train2014`` and ``val2014``.
        entities: The folder of Flickr30k Entities, for the regions of phrases of Flickr8k's and Flickr30k's captions.
        instances: COCO's files of object masks, such as ``instances_train2014.json``, for images of the same names.
    """

    def __init__(
        self, json_path: str, image_dir: str, *, entities: str | None = None, instances: list[str] | None = None
    ) -> None:
        self.json_path, self.image_dir = Path(json_path).expanduser(), Path(image_dir).expanduser()
        self.entities, self.instances = entities, [Path(path).expanduser() for path in instances or ()]

    def remedy(self) -> str:
        name = self.json_path.stem.removeprefix("dataset_")
        if name in ("coco", "flickr8k", "flickr30k"):
            root = shlex.quote(str(self.json_path.parent))
            return f"run captioning prepare {name}{' --karpathy' if name == 'coco' else ''} --root {root}"
        return "see data/README.md"

    def index(self, split: str) -> CaptionIndex:
        images = read_annotations(self.json_path, _SplitFile, "split file", self.remedy()).images
        if missing := [path for path in self.instances if not path.is_file()]:
            raise InputError(f"{missing[0]}: missing; {self.remedy()}")
        splits = ("train", "restval") if split == "train" else (split,)
        entries = [self._entry(image) for image in images if image.split in splits]
        if not entries:
            names = ", ".join(sorted({image.split for image in images}))
            raise InputError(f"{self.json_path}: has no image of the {split} split; its splits are {names}")
        return CaptionIndex.build(self.image_dir, entries, self.tokenizer, origin=self.json_path)

    def objects(self, split: str) -> ObjectLookup | None:
        return instance_lookup(self.instances, self.remedy(), synonyms) if self.instances else None

    def phrases(self, split: str) -> PhraseLookup | None:
        if self.entities is None:
            return None
        entities, index = Entities(self.entities), self.index(split)
        rows = range(min(len(index), 100))  # enough to notice wrong files; reading all takes long
        if not any(any(entities.sentences(index.image_path(row), index.references(row))) for row in rows):
            raise InputError(f"{entities.folder}: has no sentence of the first {len(rows)} images of the {split} split")
        return entities.phrases

    def _entry(self, image: _Image) -> ImageEntry:
        takes_tokens = isinstance(self.tokenizer, PennTreebank)
        captions = [" ".join(sentence.tokens) if takes_tokens else sentence.raw for sentence in image.sentences]
        image_id = image.imgid if image.cocoid is None else image.cocoid
        return ImageEntry(image_id, str(Path(image.filepath, image.filename)), captions)


class _Sentence(msgspec.Struct):
    tokens: list[str] = []
    raw: str = ""


class _Image(msgspec.Struct):
    split: str
    filename: str
    filepath: str = ""
    cocoid: int | None = None
    imgid: int = 0
    sentences: list[_Sentence] = []


class _SplitFile(msgspec.Struct):
    images: list[_Image]
