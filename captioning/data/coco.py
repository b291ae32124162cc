"""COCO caption files (2014 and 2017, and anything else in their layout)."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captioning.data.coco_nouns import decoys, synonyms
from captioning.data.objects import GroundedObject
from captioning.data.outlines import check_outline
from captioning.data.records import CaptionIndex, CaptionSource, ImageEntry, check_split, image_name
from captioning.errors import InputError, one_line
from captioning.vocabulary import tokenize

if TYPE_CHECKING:
    from pycocotools.coco import COCO

logger = logging.getLogger(__name__)


class CocoSource(CaptionSource):
    """Images and captions in COCO's folders: ``annotations/captions_train2017.json``, ``train2017/*.jpg`` and so on.

    COCO publishes no captions of its test images: without ``test_captions`` the validation split stands in for the test
    split, and the log says so.

    Args:
        root: the folder with ``annotations`` and the image folders.
        year: of the split, 2014 or 2017 for COCO itself.
        test_captions: a captions file for the test split, relative to ``root``.
        test_images: the folder of its images, relative to ``root``; by default ``test{year}``.
        allow_outside: let the file name images by absolute paths and by "..", anywhere on this machine.
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
        self._objects: dict[str, CocoObjects] = {}

    def prepare(self) -> None:
        """Check that the captions of every split are there.

        Raises:
            InputError: a file is missing.
        """
        for split in ("train", "val", "test"):
            path, _ = self._files(split)
            if not path.is_file():
                raise InputError(f"{path}: missing; run {self._command()} or see data/README.md")

    def index(self, split: str) -> CaptionIndex:
        """Return a split; captions are tokenised by Penn Treebank rules."""
        check_split(split)
        if split == "test" and self.test_captions is None:
            logger.warning("%s: COCO has no test captions, the validation split stands in for them", self.root)
        path, images = self._files(split)
        coco = read_coco(path, f"run {self._command()}")
        return CaptionIndex.build(self.root, _entries(coco, path, images, self.allow_outside), origin=path)

    def objects(self, split: str) -> CocoObjects | None:
        """Return the object masks of ``annotations/instances_*.json``; None where that file is missing."""
        check_split(split)
        captions, _ = self._files(split)
        path = captions.with_name(captions.name.replace("captions", "instances", 1))
        if path == captions or not path.is_file():
            return None
        if path.name not in self._objects:
            self._objects[path.name] = CocoObjects(path)
        return self._objects[path.name]

    def _files(self, split: str) -> tuple[Path, str]:
        """Return the captions file and the image folder relative to the root."""
        if split == "test" and self.test_captions is not None:
            return self.root / self.test_captions, self.test_images
        name = f"{'val' if split == 'test' else split}{self.year}"
        return self.root / "annotations" / f"captions_{name}.json", name

    def _command(self) -> str:
        return f"python scripts/prepare_data.py coco --year {self.year} --root {self.root}"


class CocoObjects:
    """The objects of an instances file, one call per image; masks are decoded on demand.

    The noun is the category's name, lower case; ``coco_nouns`` has its synonyms. Captions do not
    distinguish objects of one category, so their masks are merged, crowds ("iscrowd") included. Objects without an
    outline are left out.

    Raises:
        InputError: an outline that cannot be drawn; all are looked at, before the first is.
    """

    def __init__(self, path: Path) -> None:
        self._coco = read_coco(path, "see data/README.md")
        self._path = path
        for annotation in self._coco.dataset["annotations"]:
            if outline := annotation.get("segmentation"):
                image = self._coco.imgs.get(annotation.get("image_id"), {})
                try:
                    check_outline(outline, image.get("height"), image.get("width"))
                except InputError as error:
                    raise InputError(f"{path}: object {annotation.get('id')}: {error}") from None

    def __call__(self, image_id: int) -> list[GroundedObject]:
        """Return the objects of an image with masks (height, width) in its own pixels; [] if none are known.

        Raises:
            InputError: an object's category or outline cannot be read.
        """
        from pycocotools import mask as run_lengths

        outlines: dict[str, list[Any]] = {}
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy 2, about pycocotools' C code
            try:
                for annotation in self._coco.imgToAnns.get(image_id, ()):
                    where = f"object {annotation.get('id')}"
                    if annotation.get("segmentation"):
                        noun = self._coco.cats[annotation["category_id"]]["name"].lower()
                        outlines.setdefault(noun, []).append(self._coco.annToRLE(annotation))
                for noun, parts in outlines.items():
                    where = f"the outlines of {noun}"
                    mask = run_lengths.decode(run_lengths.merge(parts)).astype(bool)
                    found.append(GroundedObject(noun, synonyms(noun), frozenset(), mask, decoys(noun)))
            except Exception as error:  # pycocotools' C code raises plain Exceptions too
                raise InputError(f"{self._path}: image {image_id}: {where} cannot be read ({error!r})") from error
        return found


def read_coco(path: Path, remedy: str) -> COCO:
    """Read an annotation file with pycocotools, without its printing.

    Raises:
        InputError: the file is missing or not in COCO's layout; ``remedy`` says what to do if it is missing.
    """
    from pycocotools.coco import COCO  # slow to import: brings matplotlib

    try:
        dataset = json.loads(path.read_bytes())
        for key in ("images", "annotations"):
            if not isinstance(dataset.get(key), list):
                raise InputError(f"{path}: not a COCO annotation file, it has no list of {key}")
        if any("category_id" not in annotation for annotation in dataset["annotations"]):
            # Some exporters add categories to caption files, and pycocotools then fails on annotations without one.
            dataset.pop("categories", None)
        coco = COCO()
        coco.dataset = dataset
        with contextlib.redirect_stdout(io.StringIO()):
            coco.createIndex()
    except FileNotFoundError:
        raise InputError(f"{path}: missing; {remedy}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: not a COCO annotation file ({type(error).__name__}: {one_line(error)})") from error
    return coco


def _entries(coco: COCO, path: Path, images: str, allow_outside: bool) -> Iterator[ImageEntry]:
    """Yield the images in the file's order.

    Raises:
        InputError: an image without a file name or with one elsewhere, an annotation without a caption, or a caption of
            an unknown image.
    """
    unknown = coco.imgToAnns.keys() - coco.imgs.keys()
    if unknown:
        image_id = min(unknown, key=str)
        raise InputError(f"{path}: caption {coco.imgToAnns[image_id][0]['id']} is of image {image_id}, which it lacks")
    for image in coco.dataset["images"]:
        image_id, name = image["id"], image.get("file_name")
        if not isinstance(image_id, int):
            raise InputError(f"{path}: image ids must be whole numbers, got {image_id!r}")
        if not isinstance(name, str) or not name:
            raise InputError(f"{path}: image {image_id} has no file")
        image_name(name, allow_outside=allow_outside, where=f"{path}: image {image_id}")
        captions = [_caption(annotation, path) for annotation in coco.imgToAnns.get(image_id, ())]
        yield ImageEntry(image_id, f"{images}/{name}", captions)


def _caption(annotation: dict[str, Any], path: Path) -> str:
    caption = annotation.get("caption")
    if not isinstance(caption, str):
        raise InputError(f"{path}: image {annotation['image_id']}: annotation {annotation['id']} has no caption")
    return " ".join(tokenize(caption))
