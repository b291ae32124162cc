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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from captioning.errors import InputError
from captioning.tokenizers import PennTreebank, Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

    from captioning.data.objects import ObjectLookup
    from captioning.data.transforms import Preprocessing

logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
_TOGETHER = 1 << 14
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
    def pack(cls, strings: Sequence[str]) -> PackedStrings:
        blob = bytearray()
        offsets = np.zeros(len(strings) + 1, np.int64)
        for start in range(0, len(strings), _TOGETHER):
            some = strings[start : start + _TOGETHER]
            whole = "".join(some)
            encoded = whole.encode("utf-8")
            # In ASCII a character is a byte.
            sizes = map(len, some if len(encoded) == len(whole) else (string.encode("utf-8") for string in some))
            offsets[start + 1 : start + 1 + len(some)] = np.fromiter(sizes, np.int64, len(some))
            blob += encoded
        np.cumsum(offsets, out=offsets)
        packed = torch.frombuffer(blob, dtype=torch.uint8) if blob else torch.empty(0, dtype=torch.uint8)
        return cls(packed, torch.from_numpy(offsets))

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


def check_texts(texts: Iterable[str], where: str | Path) -> None:
    """Raises:
    InputError: a text that UTF-8 cannot hold. JSON can hold half of a pair of surrogates.
    """
    texts = list(texts)
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        for text in texts:
            if any("\ud800" <= letter <= "\udfff" for letter in text):
                raise InputError(
                    f"{where}: {text!a:.80} is no text that UTF-8 can hold; mend or leave out the entry"
                ) from None


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
        left_out: captions without a word, and images without captions, that the file has and the index has not.
        upright: photographs are turned as their cameras marked them. False where masks lie on the pixels as stored.
    """

    root: Path
    image_ids: Tensor
    paths: PackedStrings
    captions: PackedStrings
    caption_lengths: Tensor
    first_caption: Tensor
    caption_image: Tensor
    origin: str = ""
    left_out: tuple[int, int] = (0, 0)
    upright: bool = False

    @classmethod
    def build(
        cls, root: str | Path, entries: Iterable[ImageEntry], *, origin: str | Path = "", upright: bool = False
    ) -> CaptionIndex:
        """Pack the entries of a reader.

        A caption without a word is left out, and so is an image without captions, which can neither be trained on nor
        scored: one line in the log counts both. Equal captions of one image are kept: they are two references.

        Args:
            origin: the file that the entries come from, for messages.
            upright: turn photographs as their cameras marked them.

        Raises:
            InputError: an image id appears twice or is out of range, a caption is too long or no text, or none is left.
        """
        image_ids: list[int] = []
        paths, counts, captions = [], array("q"), []
        for entry in entries:
            image_ids.append(entry.image_id)
            paths.append(entry.path)
            counts.append(len(entry.captions))
            captions += [" ".join(caption.split()) for caption in entry.captions]
        check_texts(itertools.chain(captions, paths), str(origin) or str(root))
        index = cls.pack(root, image_ids, paths, counts, captions, origin=origin)
        return dataclasses.replace(index, upright=upright)

    @classmethod
    def pack(
        cls,
        root: str | Path,
        image_ids: Sequence[int],
        paths: Sequence[str],
        counts: Sequence[int],
        captions: Sequence[str],
        *,
        origin: str | Path = "",
    ) -> CaptionIndex:
        """``build`` from columns.

        Args:
            image_ids, paths: of every image.
            counts: captions of every image.
            captions: of one image after the other; the words of each joined by one space. Texts that went through
                ``check_texts``, as paths did.
        """
        name = str(origin) or str(root)
        if image_ids and not 0 <= min(image_ids) <= max(image_ids) < 2**63:
            wrong = next(row for row, image_id in enumerate(image_ids) if not 0 <= image_id < 2**63)
            raise InputError(f"{name}: image ids must be in 0 .. 2^63 - 1, got {image_ids[wrong]} ({paths[wrong]})")
        if len(set(image_ids)) != len(image_ids):
            seen: set[int] = set()
            for image_id, path in zip(image_ids, paths, strict=True):
                if image_id in seen:
                    raise InputError(f"{name}: image {image_id} appears twice ({path}); ids must be unique")
                seen.add(image_id)
        owners = np.repeat(np.arange(len(paths), dtype=np.int32), counts)
        empty = captions.count("")
        if empty:
            has_words = np.fromiter(map(bool, captions), bool, len(captions))
            owners, captions = owners[has_words], list(filter(None, captions))
        kept = np.bincount(owners, minlength=len(paths)) if len(paths) else np.empty(0, np.int64)
        ids = np.asarray(image_ids, dtype=np.int64)
        bare = int((kept == 0).sum())
        if bare:
            rows = np.flatnonzero(kept)
            owners = (np.cumsum(kept > 0) - 1)[owners]
            ids, kept, paths = ids[rows], kept[rows], [paths[row] for row in rows.tolist()]
        if not len(ids):
            raise InputError(f"{name}: holds no image with a caption")
        words = np.fromiter(map(str.count, captions, itertools.repeat(" ")), np.int32, len(captions)) + 1
        if (longest := int(words.max())) > MAX_WORDS:
            image_id = ids[owners[words.argmax()]]
            raise InputError(
                f"{name}: image {image_id} has a caption of {longest:,} words, more than {MAX_WORDS}; "
                "cut it or leave it out"
            )
        index = cls(
            root=Path(root),
            image_ids=torch.from_numpy(ids),
            paths=PackedStrings.pack(paths),
            captions=PackedStrings.pack(captions),
            caption_lengths=torch.from_numpy(words),
            first_caption=torch.from_numpy(np.r_[0, np.cumsum(kept)]),
            caption_image=torch.from_numpy(owners.astype(np.int32)),
            origin=name,
            left_out=(empty, bare),
        )
        index.warn_left_out()
        return index

    def warn_left_out(self) -> None:
        """Say in the log what ``build`` left out."""
        if any(self.left_out):
            message = "%s: left out %d captions without a word and %d images without captions"
            logger.warning(message, self.origin, *self.left_out)

    def __len__(self) -> int:
        return len(self.image_ids)

    def image_path(self, i: int) -> Path:
        """Return the file of image row ``i``."""
        return self.root / self.paths[i]

    def image(self, i: int, preprocessing: Preprocessing) -> Image:
        """Read the file of image row ``i``, for this preprocessing.

        Raises:
            InputError: it cannot be read.
        """
        return preprocessing.load(self.image_path(i), turn_upright=self.upright)

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
    """A data set as the data module sees it. Constructors take plain options, so that a YAML file can name a source.

    Attributes:
        tokenizer: what makes words of its captions; the data module sets its own.
    """

    tokenizer: Tokenizer = PennTreebank()

    @property
    def tokens(self) -> str:
        """What the words of captions are, in words."""
        return self.tokenizer.description

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
    if not allow_outside and (os.path.isabs(name) or (".." in name and ".." in Path(name).parts)):
        raise InputError(
            f"{where}: {name!r} lies outside the folder of the images; if the file is to be trusted, set allow_outside "
            "of the data source"
        )
    return name


def check_split(split: str) -> None:
    """Raise an ``InputError`` unless ``split`` is one of ``SPLITS``."""
    if split not in SPLITS:
        raise InputError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
