"""COCO caption files (2014 and 2017, and anything else in their layout)."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from captioning.data.coco_nouns import decoys, synonyms
from captioning.data.objects import GroundedObject, check_outline, run_lengths
from captioning.data.records import (
    CaptionIndex,
    CaptionSource,
    check_split,
    image_name,
    read_annotations,
)
from captioning.errors import InputError

logger = logging.getLogger(__name__)

_TOGETHER = 1 << 14
"""Captions that are tokenised together, few enough for the processor's cache."""


class CocoSource(CaptionSource):
    """Images and captions in COCO's folders: ``annotations/captions_train2017.json``, ``train2017/*.jpg`` and so on.

    COCO publishes no captions of its test images: without ``test_captions`` the validation split stands in for the test
    split, and the log says so.

    Args:
        root: The folder with ``annotations`` and the image folders.
        year: Year of the split, 2014 or 2017 for COCO itself.
        test_captions: A captions file for the test split, relative to ``root``.
        test_images: The folder of its images, relative to ``root``; by default ``test{year}``.
        allow_outside: Whether the file may name images by absolute paths and by "..", anywhere on this machine.
    """

    def __init__(
        self,
        root: str = "data/coco",
        *,
        year: int = 2017,
        test_captions: str | None = None,
        test_images: str | None = None,
        allow_outside: bool = False,
    ) -> None:
        self.root = Path(root)
        self.year = year
        self.test_captions = test_captions
        self.test_images = test_images or f"test{year}"
        self.allow_outside = allow_outside
        self._objects: dict[Path, CocoObjects] = {}

    @property
    def description(self) -> str:
        return f"the photographs of {self.root.name}"

    def prepare(self) -> None:
        """Check that the captions of every split exist.

        Raises:
            InputError: A file is missing.
        """
        for split in ("train", "val", "test"):
            path, _ = self._files(split)
            if not path.is_file():
                raise InputError(f"{path}: missing; {self._remedy()}")

    def index(self, split: str) -> CaptionIndex:
        """Return a split; captions are tokenised."""
        check_split(split)
        if split == "test" and self.test_captions is None:
            logger.warning("%s: COCO has no test captions, the validation split stands in for them", self.root)
        path, folder = self._files(split)
        content = read_annotations(path, _Captions, "COCO annotation file", self._remedy())
        row_of = {image.id: row for row, image in enumerate(content.images)}
        rows = map(row_of.get, [annotation.image_id for annotation in content.annotations], itertools.repeat(-1))
        owners = np.fromiter(rows, np.int64, len(content.annotations))
        if (owners < 0).any():
            annotation = content.annotations[int(owners.argmin())]
            raise InputError(
                f"{path}: caption {annotation.id} is of image {annotation.image_id}, which is not in the file"
            )
        captions = [annotation.caption for annotation in content.annotations]
        order = owners.argsort(kind="stable").tolist()
        image_ids = [image.id for image in content.images]
        paths = [self._image_path(image, path, folder) for image in content.images]
        del content  # half of the memory
        counts = np.bincount(owners, minlength=len(paths))
        texts = []
        for start in range(0, len(order), _TOGETHER):
            texts += self.tokenizer.tokenize_all([captions[number] for number in order[start : start + _TOGETHER]])
        return CaptionIndex.pack(self.root, image_ids, paths, counts, texts, origin=path)

    def _image_path(self, image: _Image, captions: Path, folder: str) -> str:
        where = f"{captions}: image {image.id}"
        if not image.file_name:
            raise InputError(f"{where} has no file")
        name = image_name(image.file_name, allow_outside=self.allow_outside, where=where)
        return name if name[0] == "/" else f"{folder}/{name}"

    def objects(self, split: str) -> CocoObjects | None:
        """Return the object masks of ``annotations/instances_*.json``; None if that file is missing."""
        check_split(split)
        captions, _ = self._files(split)
        path = captions.with_name(captions.name.replace("captions", "instances", 1))
        if path == captions or not path.is_file():
            return None
        if path not in self._objects:
            self._objects[path] = CocoObjects(path)
        return self._objects[path]

    def _files(self, split: str) -> tuple[Path, str]:
        """Return the captions file and the image folder relative to the root."""
        if split == "test" and self.test_captions is not None:
            return self.root / self.test_captions, self.test_images
        name = f"{'val' if split == 'test' else split}{self.year}"
        return self.root / "annotations" / f"captions_{name}.json", name

    def _remedy(self) -> str:
        return f"run captioning prepare coco --year {self.year} --root {self.root}, or see data/README.md"


class CocoObjects:
    """The objects of an instances file, one call per image; masks are decoded on demand.

    The noun is the category's name in lower case; ``coco_nouns`` has its synonyms. Captions do not distinguish objects
    of one category, so their masks are merged, crowds ("iscrowd") included. Objects without an outline are left out.

    Raises:
        InputError: An object has an outline that cannot be drawn or an unknown category. All objects are checked.
    """

    def __init__(self, path: Path) -> None:
        content = read_annotations(path, _Instances, "COCO annotation file", "see data/README.md")
        self._sizes = {image.id: (image.height, image.width) for image in content.images}
        nouns = {category.id: category.name.lower() for category in content.categories}
        self._outlines: dict[int, dict[str, list[Any]]] = {}  # by image and noun
        for instance in content.annotations:
            if not instance.segmentation:
                continue
            where = f"{path}: object {instance.id}"
            if instance.category_id not in nouns:
                raise InputError(f"{where} is of category {instance.category_id}, which is not in the file")
            try:
                check_outline(instance.segmentation, *self._sizes.get(instance.image_id, (0, 0)))
            except InputError as error:
                raise InputError(f"{where}: {error}") from None
            outlines = self._outlines.setdefault(instance.image_id, {})
            outlines.setdefault(nouns[instance.category_id], []).append(instance.segmentation)

    def __call__(self, image_id: int) -> list[GroundedObject]:
        """Return the objects of an image with masks (height, width) in its own pixels; [] if none are known."""
        objects = []
        with run_lengths() as coco:
            for noun, outlines in self._outlines.get(image_id, {}).items():
                runs = []
                for outline in outlines:
                    if isinstance(outline, dict) and isinstance(outline["counts"], str):
                        runs.append(outline)
                    elif isinstance(outline, dict):
                        runs.append(coco.frPyObjects(outline, *self._sizes[image_id]))
                    else:
                        runs += coco.frPyObjects(outline, *self._sizes[image_id])
                mask = coco.decode(coco.merge(runs)).astype(bool)
                objects.append(GroundedObject(noun, synonyms(noun), frozenset(), mask, decoys(noun)))
        return objects


# The members of the files that count; the others are skipped. ``gc=False``: a split has 592,000 captions, which the
# garbage collector would search again and again.


class _Image(msgspec.Struct, gc=False):
    id: int
    file_name: str = ""


class _Annotation(msgspec.Struct, gc=False):
    image_id: int
    caption: str
    id: Any = None


class _Captions(msgspec.Struct):
    images: list[_Image]
    annotations: list[_Annotation]


class _ImageSize(msgspec.Struct, gc=False):
    id: int
    height: int = 0
    width: int = 0


class _Category(msgspec.Struct):
    id: int
    name: str


class _Instance(msgspec.Struct):
    image_id: int
    category_id: int
    segmentation: Any = None
    id: Any = None


class _Instances(msgspec.Struct):
    images: list[_ImageSize]
    annotations: list[_Instance]
    categories: list[_Category]
