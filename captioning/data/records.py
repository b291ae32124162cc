"""One index for every data set: its images, their files and their tokenised captions.

The index is a handful of tensors, not a million Python objects: a COCO-sized split (592,000 captions) takes about 50
MB, and after ``share_memory`` data-loading workers read the same pages instead of getting a copy each.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from captioning.errors import InputError

if TYPE_CHECKING:
    from captioning.data.objects import ObjectLookup

logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
MAX_WORDS = 500
"""Of a caption: memory and time of a batch grow with its longest, and one far longer than the others is a mistake."""


@dataclass
class ImageEntry:
    """One image, as a reader yields it.

    Attributes:
        image_id: the data set's own number, unique within a split.
        path: the image file, relative to the index's root.
        captions: tokenised captions, the words of each joined by spaces.
    """

    image_id: int
    path: str
    captions: list[str]


class PackedStrings:
    """An immutable list of strings, kept as one block of UTF-8 bytes and its offsets.

    Args:
        blob: (bytes,) uint8.
        offsets: (len + 1,) int64; string ``i`` is ``blob[offsets[i]:offsets[i + 1]]``.
    """

    def __init__(self, blob: Tensor, offsets: Tensor) -> None:
        self.blob = blob
        self.offsets = offsets

    @classmethod
    def pack(cls, strings: Iterable[str]) -> PackedStrings:
        packer = _Packer()
        for string in strings:
            packer.append(string)
        return packer.packed()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> str:
        if not -len(self) <= i < len(self):
            raise IndexError(f"string {i} of {len(self)}")
        i %= len(self)
        start, stop = self.offsets[i : i + 2].tolist()
        return str(self.blob[start:stop].numpy().data, "utf-8")

    def __iter__(self) -> Iterator[str]:
        view, offsets = self.blob.numpy().data, self.offsets.tolist()
        return (str(view[start:stop], "utf-8") for start, stop in itertools.pairwise(offsets))

    def take(self, limit: int) -> PackedStrings:
        """Return the first ``limit`` strings as a copy of their own."""
        offsets = self.offsets[: limit + 1].clone()
        return PackedStrings(self.blob[: int(offsets[-1])].clone(), offsets)

    def share_memory(self) -> None:
        self.blob.share_memory_()
        self.offsets.share_memory_()


class _Packer:
    """Collects strings for ``PackedStrings`` without holding on to the string objects."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self.offsets = array("q", [0])

    def append(self, string: str) -> None:
        try:
            self.bytes += string.encode("utf-8")
        except UnicodeEncodeError:  # JSON can hold half of a pair of surrogates
            raise InputError(f"{string!a:.80} is no text that UTF-8 can hold; mend or leave out the entry") from None
        self.offsets.append(len(self.bytes))

    def packed(self) -> PackedStrings:
        return PackedStrings(_tensor(self.bytes, torch.uint8), _tensor(self.offsets, torch.int64))


def _tensor(buffer: bytearray | array, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(buffer, dtype=dtype) if len(buffer) else torch.empty(0, dtype=dtype)


@dataclass
class CaptionIndex:
    """One split of a data set: N images and their M captions.

    Attributes:
        root: the folder that ``paths`` are relative to.
        image_ids: (N,) int64, the data set's own numbers.
        paths: N image files relative to ``root``.
        captions: M tokenised captions, the words of each joined by one space; an image's captions lie side by side.
        caption_lengths: (M,) int32, words per caption, <start> and <end> not counted; at least 1.
        first_caption: (N+1,) int64; image ``i`` owns captions ``first_caption[i]:first_caption[i + 1]``.
        caption_image: (M,) int32, the row of the image that a caption describes.
        origin: the file that the captions were read from, for messages.
    """

    root: Path
    image_ids: Tensor
    paths: PackedStrings
    captions: PackedStrings
    caption_lengths: Tensor
    first_caption: Tensor
    caption_image: Tensor
    origin: str = ""

    @classmethod
    def build(cls, root: str | Path, entries: Iterable[ImageEntry], *, origin: str | Path = "") -> CaptionIndex:
        """Pack the entries of a reader.

        A caption without a word is left out, and so is an image without captions, which can neither be trained on nor
        scored: one line in the log counts both. Equal captions of one image are kept: they are two references.

        Args:
            origin: the file that the entries come from, for messages.

        Raises:
            InputError: an image id appears twice or is out of range, a caption is too long or no text, or none is left.
        """
        name = str(origin) or str(root)
        paths, captions = _Packer(), _Packer()
        image_ids, lengths = array("q"), array("i")
        first, caption_image = array("q", [0]), array("i")
        seen: set[int] = set()
        empty, bare = 0, 0
        for entry in entries:
            if entry.image_id in seen:
                raise InputError(f"{name}: image {entry.image_id} appears twice ({entry.path}); ids must be unique")
            if not 0 <= entry.image_id < 2**63:
                raise InputError(f"{name}: image ids must be in 0 .. 2^63 - 1, got {entry.image_id} ({entry.path})")
            seen.add(entry.image_id)
            before = len(lengths)
            for caption in entry.captions:
                words = caption.split()
                if len(words) > MAX_WORDS:
                    raise InputError(
                        f"{name}: image {entry.image_id} has a caption of {len(words):,} words, more than {MAX_WORDS}; "
                        "cut it or leave it out"
                    )
                if words:
                    captions.append(" ".join(words))
                    lengths.append(len(words))
                    caption_image.append(len(image_ids))
                else:
                    empty += 1
            if len(lengths) == before:
                bare += 1
                continue
            image_ids.append(entry.image_id)
            paths.append(entry.path)
            first.append(len(lengths))
        if not image_ids:
            raise InputError(f"{name}: holds no image with a caption")
        if empty or bare:
            logger.warning("%s: left out %d captions without a word and %d images without captions", name, empty, bare)
        return cls(
            root=Path(root),
            image_ids=_tensor(image_ids, torch.int64),
            paths=paths.packed(),
            captions=captions.packed(),
            caption_lengths=_tensor(lengths, torch.int32),
            first_caption=_tensor(first, torch.int64),
            caption_image=_tensor(caption_image, torch.int32),
            origin=name,
        )

    def __len__(self) -> int:
        return len(self.image_ids)

    def image_path(self, i: int) -> Path:
        """Return the file of image row ``i``."""
        return self.root / self.paths[i]

    def references(self, i: int) -> list[str]:
        """Return the captions of image row ``i``."""
        first, last = self.first_caption[i : i + 2].tolist()
        return [self.captions[j] for j in range(first, last)]

    def take(self, limit: int) -> CaptionIndex:
        """Return the first ``limit`` images with their captions, as a copy; all of them if there are fewer."""
        if limit < 1:
            raise InputError(f"limit must be at least 1 image, got {limit}")
        images = min(limit, len(self))
        captions = int(self.first_caption[images])
        return dataclasses.replace(
            self,
            image_ids=self.image_ids[:images].clone(),
            paths=self.paths.take(images),
            captions=self.captions.take(captions),
            caption_lengths=self.caption_lengths[:captions].clone(),
            first_caption=self.first_caption[: images + 1].clone(),
            caption_image=self.caption_image[:captions].clone(),
        )

    def share_memory(self) -> CaptionIndex:
        """Move the tensors into shared memory and return the index: workers, forked or spawned, then get no copy."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                value.share_memory_()
            elif isinstance(value, PackedStrings):
                value.share_memory()
        return self

    def check_images(self, sample: int = 64) -> None:
        """Check that the files of ``sample`` images exist, spread evenly over the split.

        Checking all 120,000 of COCO takes long on a network disk; a forgotten download or a wrong folder shows in a
        sample, and ``scripts/prepare_data.py --check`` checks every file. Readers do not call this, because training
        from cached features needs no images: the code that opens images does.

        Raises:
            InputError: a file is missing.
        """
        count = min(sample, len(self))
        rows = [k * (len(self) - 1) // max(count - 1, 1) for k in range(count)]
        missing = [i for i in rows if not self.image_path(i).is_file()]
        if missing:
            raise InputError(
                f"{self.origin}: image {int(self.image_ids[missing[0]])} has no file: {self.image_path(missing[0])} is "
                f"missing ({len(missing)} of {count} checked); see data/README.md"
            )


class CaptionSource:
    """A data set as the data module sees it. Constructors take plain options, so that a YAML file can name a source."""

    def prepare(self) -> None:
        """Generate the data or check that its files are there. Runs once per machine, before ``index``.

        Raises:
            InputError: a file is missing; says which, and what to run.
        """
        raise TypeError(f"{type(self).__name__} must define prepare()")

    def index(self, split: str) -> CaptionIndex:
        """Return the images and captions of ``"train"``, ``"val"`` or ``"test"``.

        Raises:
            InputError: the files cannot be read, or have no such split.
        """
        raise TypeError(f"{type(self).__name__} must define index()")

    def objects(self, split: str) -> ObjectLookup | None:
        """Return where the named objects of the split's images are, or None if the data set has no masks."""
        return None


def image_name(name: str, *, allow_outside: bool, where: str) -> str:
    """Return what an annotation file calls an image, if that is a place inside the folder of the images.

    Args:
        allow_outside: the user has said that the file may name any place.
        where: the file and image, for messages.

    Raises:
        InputError: it is an absolute path or leads out by "..", or holds a NUL character.
    """
    if "\0" in name:
        raise InputError(f"{where}: {name!r} is not the name of a file")
    if not allow_outside and (os.path.isabs(name) or ".." in Path(name).parts):
        raise InputError(
            f"{where}: {name!r} lies outside the folder of the images; if the file is to be trusted, set allow_outside "
            "of the data source"
        )
    return name


def check_split(split: str) -> None:
    """Raise an ``InputError`` unless ``split`` is one of ``SPLITS``."""
    if split not in SPLITS:
        raise InputError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
