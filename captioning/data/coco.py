"""COCO caption files (2014 and 2017, and anything else in their layout)."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from captioning.data.coco_nouns import synonyms
from captioning.data.images import upright_masks
from captioning.data.records import (
    CaptionIndex,
    CaptionSource,
    GroundedObject,
    ImageEntry,
    ObjectLookup,
    read_annotations,
)
from captioning.errors import InputError, warn_once


class CocoSource(CaptionSource):
    """Images and captions in COCO's folders: ``annotations/captions_train2017.json``, ``train2017/*.jpg`` and so on.

    COCO publishes no captions of its test images: without ``test_captions`` the validation split stands in for the test
    split, and the log says so. For COCO's server, set ``year: 2014`` and
    ``test_captions: annotations/image_info_test2014.json``, and run `captioning predict`.

    Args:
        root: The folder with ``annotations`` and the image folders.
        year: Year of the split, 2014 or 2017 for COCO itself.
        test_captions: The file of the test split, relative to ``root``: captions, or images without captions. The
            images are in ``test{year}``.
    """

    def __init__(self, root: str = "data/coco", *, year: int = 2017, test_captions: str | None = None) -> None:
        self.root, self.year, self.test_captions = Path(root).expanduser(), year, test_captions

    def files(self, split: str) -> tuple[Path, str]:
        """Return the captions file of a split, and its image folder relative to the root."""
        if split == "test" and self.test_captions is not None:
            return self.root / self.test_captions, f"test{self.year}"
        name = f"{'val' if split == 'test' else split}{self.year}"
        return self.root / "annotations" / f"captions_{name}.json", name

    def remedy(self) -> str:
        root = shlex.quote(str(self.root))
        return f"run captioning prepare coco --year {self.year} --root {root}, or see data/README.md"

    def synonyms(self, word: str) -> frozenset[str]:
        """Return the other names of an object or of an attribute."""
        return synonyms(word)

    def index(self, split: str) -> CaptionIndex:
        path, folder = self.files(split)
        if split == "test" and path == self.files("val")[0]:
            warn_once(f"{self.root}: COCO has no test captions, the validation split stands in for them")
        content = read_annotations(path, _File, "COCO annotation file", self.remedy())
        captions: dict[int, list[str]] = {image.id: [] for image in content.images}
        for annotation in content.annotations:
            if annotation.image_id not in captions:
                raise InputError(f"{path}: has a caption of image {annotation.image_id}, but not the image")
            captions[annotation.image_id].append(annotation.caption)
        entries = [ImageEntry(image.id, f"{folder}/{image.file_name}", captions[image.id]) for image in content.images]
        uncaptioned = split == "test" and not content.annotations
        return CaptionIndex.build(self.root, entries, self.tokenizer, origin=path, uncaptioned=uncaptioned)

    def objects(self, split: str) -> ObjectLookup | None:
        """Return a lookup in ``annotations/instances_*.json``; None if that file is missing.

        The noun is the category's name in lower case. Crowds are objects, too. Objects without an outline are left out.
        """
        captions, _ = self.files(split)
        path = captions.with_name(captions.name.replace("captions", "instances", 1))
        if path == captions or not path.is_file():
            return None
        return instance_lookup([path], self.remedy(), self.synonyms)


def instance_lookup(paths: Sequence[Path], remedy: str, synonyms: Callable[[str], frozenset[str]]) -> ObjectLookup:
    """Return a lookup in COCO's ``instances_*.json`` by image file name. Masks are of the upright image.

    ``remedy`` says what to do if a file is missing. ``synonyms`` returns the other names of an object or an attribute.
    """
    by_file: dict[str, tuple[_Image, list[tuple[str, _Annotation]]]] = {}
    for path in paths:
        content = read_annotations(path, _File, "COCO annotation file", remedy)
        images = {image.id: by_file.setdefault(image.file_name, (image, [])) for image in content.images}
        nouns = {category.id: category.name.lower() for category in content.categories}
        for annotation in content.annotations:
            if annotation.segmentation and annotation.image_id in images:
                images[annotation.image_id][1].append((nouns[annotation.category_id], annotation))

    def objects(path: Path) -> list[GroundedObject]:
        from pycocotools.coco import COCO

        if path.name not in by_file:
            return []
        image, annotations = by_file[path.name]
        coco = COCO()
        coco.imgs = {image.id: {"height": image.height, "width": image.width}}
        outlines = [{"image_id": image.id, "segmentation": annotation.segmentation} for _, annotation in annotations]
        masks = [coco.annToMask(outline).astype(bool) for outline in outlines]
        objects = []
        for (noun, annotation), mask in zip(annotations, upright_masks(masks, path), strict=True):
            adjectives = frozenset(annotation.attributes)
            objects.append(GroundedObject(noun, synonyms(noun), adjectives.union(*map(synonyms, adjectives)), mask))
        return objects

    return objects


# The fields of captions and instances files. With ``gc=False`` the garbage collector skips the 592,000 captions.


class _Image(msgspec.Struct, gc=False):
    id: int
    file_name: str
    height: int = 0
    width: int = 0


class _Annotation(msgspec.Struct, gc=False):
    image_id: int
    caption: str = ""
    category_id: int = 0
    segmentation: Any = None  # packed run lengths, plain ones, or polygons
    attributes: list[str] = []


class _Category(msgspec.Struct):
    id: int
    name: str


class _File(msgspec.Struct):
    images: list[_Image]
    annotations: list[_Annotation] = []
    categories: list[_Category] = []
