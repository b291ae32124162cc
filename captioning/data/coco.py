"""COCO caption files (2014 and 2017, and anything else in their layout)."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from captioning.data.coco_nouns import synonyms
from captioning.data.objects import GroundedObject
from captioning.data.records import SPLITS, CaptionIndex, CaptionSource, ImageEntry, read_annotations
from captioning.errors import InputError

logger = logging.getLogger(__name__)


class CocoSource(CaptionSource):
    """Images and captions in COCO's folders: ``annotations/captions_train2017.json``, ``train2017/*.jpg`` and so on.

    COCO publishes no captions of its test images: without ``test_captions`` the validation split stands in for the test
    split, and the log says so.

    Args:
        root: The folder with ``annotations`` and the image folders.
        year: Year of the split, 2014 or 2017 for COCO itself.
        test_captions: A captions file for the test split, relative to ``root``.
        test_images: The folder of its images, relative to ``root``; by default ``test{year}``.
    """

    def __init__(
        self,
        root: str = "data/coco",
        *,
        year: int = 2017,
        test_captions: str | None = None,
        test_images: str | None = None,
    ) -> None:
        self.root, self.year = Path(root), year
        self.test_captions, self.test_images = test_captions, test_images or f"test{year}"
        self._objects: dict[Path, CocoObjects] = {}

    def files(self, split: str) -> tuple[Path, str]:
        """Return the captions file of a split, and its image folder relative to the root."""
        if split == "test" and self.test_captions is not None:
            return self.root / self.test_captions, self.test_images
        name = f"{'val' if split == 'test' else split}{self.year}"
        return self.root / "annotations" / f"captions_{name}.json", name

    def annotations(self) -> list[Path]:
        return [self.files(split)[0] for split in SPLITS]

    def remedy(self) -> str:
        return f"run captioning prepare coco --year {self.year} --root {self.root}, or see data/README.md"

    def synonyms(self, word: str) -> frozenset[str]:
        """Return the other names of an object, and of an adjective if objects have ``attributes``."""
        return synonyms(word)

    def index(self, split: str) -> CaptionIndex:
        """Return a split; captions are tokenised."""
        path, folder = self.files(split)
        if split == "test" and path == self.files("val")[0]:
            logger.warning("%s: COCO has no test captions, the validation split stands in for them", self.root)
        content = read_annotations(path, _File, "COCO annotation file", self.remedy())
        texts = self.tokenizer.tokenize_all([annotation.caption for annotation in content.annotations])
        captions: dict[int, list[str]] = {image.id: [] for image in content.images}
        for annotation, text in zip(content.annotations, texts, strict=True):
            if annotation.image_id not in captions:
                raise InputError(
                    f"{path}: caption {annotation.id} is of image {annotation.image_id}, which is not in the file"
                )
            captions[annotation.image_id].append(text)
        entries = [ImageEntry(image.id, f"{folder}/{image.file_name}", captions[image.id]) for image in content.images]
        return CaptionIndex.build(self.root, entries, origin=path)

    def objects(self, split: str) -> CocoObjects | None:
        """Return the object masks of ``annotations/instances_*.json``; None if that file is missing."""
        captions, _ = self.files(split)
        path = captions.with_name(captions.name.replace("captions", "instances", 1))
        if path == captions or not path.is_file():
            return None
        if path not in self._objects:
            self._objects[path] = CocoObjects(path, self.synonyms)
        return self._objects[path]


class CocoObjects:
    """The objects of an instances file, one call per image; masks are decoded on demand.

    The noun is the category's name in lower case, ``synonyms`` returns the other names of a noun or adjective. Captions
    do not distinguish objects of one category (and of the same ``attributes``, which the generated shapes have), so
    their masks are merged, crowds included. Objects without an outline are left out.

    Raises:
        InputError: The file cannot be read, or an object is of an unknown category or image.
    """

    def __init__(self, path: Path, synonyms: Callable[[str], frozenset[str]]) -> None:
        content = read_annotations(path, _File, "COCO annotation file", "see data/README.md")
        self._synonyms = synonyms
        self._sizes = {image.id: (image.height, image.width) for image in content.images}
        nouns = {category.id: category.name.lower() for category in content.categories}
        self._outlines: dict[int, dict[tuple[str, ...], list[Any]]] = {}  # by image, then by noun and adjectives
        for thing in content.annotations:
            if thing.category_id not in nouns or thing.image_id not in self._sizes:
                raise InputError(
                    f"{path}: object {thing.id} is of category {thing.category_id} and image {thing.image_id}, one of "
                    "which is not in the file"
                )
            if thing.segmentation:
                outlines = self._outlines.setdefault(thing.image_id, {})
                outlines.setdefault((nouns[thing.category_id], *thing.attributes), []).append(thing.segmentation)

    def __call__(self, image_id: int) -> list[GroundedObject]:
        """Return the objects of an image with masks (height, width) in its own pixels; [] if none are known."""
        from pycocotools import mask as coco

        objects = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy 2 about pycocotools' C code
            for (noun, *adjectives), outlines in self._outlines.get(image_id, {}).items():
                runs = []
                for outline in outlines:  # packed run lengths, plain ones, or polygons
                    packed = isinstance(outline, dict) and isinstance(outline["counts"], str)
                    encoded = outline if packed else coco.frPyObjects(outline, *self._sizes[image_id])
                    runs += encoded if isinstance(encoded, list) else [encoded]
                attributes = frozenset(adjectives).union(*map(self._synonyms, adjectives))
                mask = coco.decode(coco.merge(runs)).astype(bool)
                objects.append(GroundedObject(noun, self._synonyms(noun), attributes, mask))
        return objects


# The members of captions and instances files that count; others are skipped. ``gc=False``: a split has 592,000
# captions, which the garbage collector would search again and again.


class _Image(msgspec.Struct, gc=False):
    id: int
    file_name: str
    height: int = 0
    width: int = 0


class _Annotation(msgspec.Struct, gc=False):
    image_id: int
    id: Any = None
    caption: str = ""
    category_id: int = 0
    segmentation: Any = None
    attributes: list[str] = []


class _Category(msgspec.Struct):
    id: int
    name: str


class _File(msgspec.Struct):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category] = []
