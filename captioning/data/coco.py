"""COCO caption files (2014 and 2017, and anything else in their layout)."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import mmap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioning.data.coco_nouns import decoys, synonyms
from captioning.data.index_cache import cached_index
from captioning.data.objects import GroundedObject
from captioning.data.outlines import check_outline
from captioning.data.records import CaptionIndex, CaptionSource, check_split, check_texts, image_name
from captioning.errors import InputError, one_line

if TYPE_CHECKING:
    import msgspec
    from pycocotools.coco import COCO

logger = logging.getLogger(__name__)

_DENSE = 64  # a table of so many numbers an image is looked up faster than a dictionary, and is small


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
        self._objects: dict[Path, CocoObjects] = {}

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
        """Return a split; captions are tokenised."""
        check_split(split)
        if split == "test" and self.test_captions is None:
            logger.warning("%s: COCO has no test captions, the validation split stands in for them", self.root)
        path, images = self._files(split)
        with _opened(path, f"run {self._command()}"):
            options = (str(path), images, self.allow_outside)
            return cached_index(path, options, self.root, lambda: self._index(path, images), self.tokenizer)

    def _index(self, path: Path, images: str) -> CaptionIndex:
        captions = _captions(path)
        for image_id, name in zip(captions.image_ids, captions.names, strict=True):
            if not isinstance(name, str) or not name:
                raise InputError(f"{path}: image {image_id} has no file")
            if "/" in name or "\\" in name or "\0" in name or name == "..":
                image_name(name, allow_outside=self.allow_outside, where=f"{path}: image {image_id}")
        check_texts(captions.names, path)
        return CaptionIndex.pack(
            self.root,
            captions.image_ids,
            [f"{images}/{name}" if name[0] != "/" else name for name in captions.names],
            captions.counts,
            self.tokenizer.tokenize_all(captions.texts),
            origin=path,
        )

    def objects(self, split: str) -> CocoObjects | None:
        """Return the object masks of ``annotations/instances_*.json``; None where that file is missing."""
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
        with _opened(path, remedy):
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
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: not a COCO annotation file ({type(error).__name__}: {one_line(error)})") from error
    return coco


@contextlib.contextmanager
def _opened(path: Path, remedy: str) -> Iterator[None]:
    """Raise the InputError of a file that cannot be opened; ``remedy`` says what to do if it is missing."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path}: missing; {remedy}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


class _Captions(NamedTuple):
    """What a captions file says, in the file's order of images."""

    image_ids: list[int]
    names: list[Any]
    counts: list[int]
    texts: list[str]


def _captions(path: Path) -> _Captions:
    """Return the images of a captions file and their captions, one image after the other.

    ``pycocotools`` would keep every annotation as an object and index it twice; a split has 592,000.

    Raises:
        InputError: it is not in COCO's layout, an annotation has no caption, or is of an unknown image.
    """
    image_ids, names, owners, texts, numbers = _columns(path)
    if not {*map(type, image_ids)} <= {int}:
        wrong = next(image_id for image_id in image_ids if type(image_id) is not int)
        raise InputError(f"{path}: image ids must be whole numbers, got {wrong!r}")
    if not {*map(type, owners)} <= {int}:  # what is of another kind may have no hash
        number = next(number for number, owner in enumerate(owners) if type(owner) is not int)
        raise InputError(f"{path}: caption {numbers[number]} is of image {owners[number]!r:.60}, which it lacks")
    rows = _rows(owners, image_ids)
    if (rows < 0).any():
        number = int(np.argmax(rows < 0))
        raise InputError(f"{path}: caption {numbers[number]} is of image {owners[number]}, which it lacks")
    if not {*map(type, texts)} <= {str}:
        number = next(number for number, text in enumerate(texts) if type(text) is not str)
        raise InputError(f"{path}: image {owners[number]}: annotation {numbers[number]} has no caption")
    check_texts(texts, path)
    order = np.argsort(rows, kind="stable").tolist()
    counts = np.bincount(rows, minlength=len(image_ids)).tolist()
    return _Captions(image_ids, names, counts, [texts[number] for number in order])


class _Columns(NamedTuple):
    """What a captions file says of every image, and of every annotation, whatever it is."""

    image_ids: list[Any]
    names: list[Any]
    owners: list[Any]
    texts: list[Any]
    numbers: list[Any]
    """The annotations' own."""


def _columns(path: Path) -> _Columns:
    """Read a captions file.

    Raises:
        InputError: it is not JSON in COCO's layout.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            # What this cannot read the other way can, or says what is wrong.
            with contextlib.suppress(ImportError, ValueError, RecursionError):
                found = _decoder().decode(content)
                return _Columns(
                    [image.id for image in found.images],
                    [image.file_name for image in found.images],
                    [annotation.image_id for annotation in found.annotations],
                    [annotation.caption for annotation in found.annotations],
                    [annotation.id for annotation in found.annotations],
                )
            dataset = json.loads(str(content, "utf-8"))
        for key in ("images", "annotations"):
            if not isinstance(dataset.get(key), list):
                raise InputError(f"{path}: not a COCO annotation file, it has no list of {key}")
        images, annotations = dataset["images"], dataset["annotations"]
        return _Columns(
            [image["id"] for image in images],
            [image.get("file_name") for image in images],
            [annotation["image_id"] for annotation in annotations],
            [annotation.get("caption") for annotation in annotations],
            [annotation.get("id") for annotation in annotations],
        )
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(f"{path}: not a COCO annotation file ({reason})") from error


@functools.cache
def _decoder() -> msgspec.json.Decoder[Any]:
    """Return what reads the members that count and skips the others, in a third of the time that all take."""
    import msgspec

    image = msgspec.defstruct("Image", [("id", Any), ("file_name", Any, None)], gc=False)
    annotation = msgspec.defstruct(
        "Annotation", [("image_id", Any), ("caption", Any, None), ("id", Any, None)], gc=False
    )
    fields = [("images", list[image]), ("annotations", list[annotation])]  # type: ignore[valid-type]
    return msgspec.json.Decoder(msgspec.defstruct("Captions", fields))


def _rows(owners: list[int], image_ids: list[int]) -> NDArray[np.int64]:
    """Return (captions,) the place of each caption's image among ``image_ids``, -1 where it has none."""
    span = max(image_ids, default=-1) + 1
    lowest, highest = min(owners, default=0), max(owners, default=0)
    if min(lowest, min(image_ids, default=0)) >= 0 and highest < span <= _DENSE * len(image_ids):
        place = np.full(span, -1, np.int32)
        place[image_ids] = np.arange(len(image_ids), dtype=np.int32)
        return place[owners].astype(np.int64)
    row_of = {image_id: row for row, image_id in enumerate(image_ids)}
    return np.array([row_of.get(owner, -1) for owner in owners], np.int64)
