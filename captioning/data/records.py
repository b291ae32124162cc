"""One index for every data set: its images, their files and their tokenised captions.

The index is a handful of tensors, not a million Python objects: a COCO-sized split (592,000 captions) takes about 50
MB, and after ``share_memory`` data-loading workers read the same pages instead of getting a copy each.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from captioning.errors import InputError, one_line
from captioning.files import read_bytes
from captioning.tokenizers import PennTreebank, Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

    from captioning.data.attributes import AttributeJudge
    from captioning.data.objects import ObjectLookup
    from captioning.data.transforms import Preprocessing

logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
_TOGETHER = 1 << 14
MAX_WORDS = 500
"""Words of a caption. The longest caption decides the memory and time of its batch, and a longer one is a mistake."""

Content = TypeVar("Content")


@dataclass
class ImageEntry:
    """One image, as a reader yields it.

    Attributes:
        image_id: The data set's own number, unique within a split.
        path: The image file, relative to the index's root.
        captions: Tokenised captions, their words joined by spaces.
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
        """Raises:
        UnicodeEncodeError: A string holds half of a pair of surrogates.
        """
        blob, sizes = bytearray(), np.zeros(len(strings) + 1, np.int64)
        for start in range(0, len(strings), _TOGETHER):
            chunk = strings[start : start + _TOGETHER]
            text = "".join(chunk)
            # An ASCII character is one byte.
            encoded = chunk if text.isascii() else [string.encode("utf-8") for string in chunk]
            blob += text.encode("utf-8")
            sizes[start + 1 : start + 1 + len(chunk)] = np.fromiter(map(len, encoded), np.int64, len(chunk))
        packed = torch.frombuffer(blob, dtype=torch.uint8) if blob else torch.empty(0, dtype=torch.uint8)
        return cls(packed, torch.from_numpy(sizes.cumsum()))

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
        """Return a copy of the first ``limit`` strings."""
        offsets = self.offsets[: limit + 1].clone()
        return PackedStrings(self.blob[: int(offsets[-1])].clone(), offsets)

    def share_memory(self) -> None:
        self.blob.share_memory_()
        self.offsets.share_memory_()


@dataclass
class CaptionIndex:
    """One split of a data set: N images and their M captions.

    Attributes:
        root: The folder that ``paths`` are relative to.
        image_ids: (N,) int64, the data set's own numbers.
        paths: N image files relative to ``root``.
        captions: M tokenised captions, their words joined by one space; the captions of an image are neighbours.
        caption_lengths: (M,) int32, words per caption, <start> and <end> not counted; at least 1.
        first_caption: (N+1,) int64; image ``i`` owns captions ``first_caption[i]:first_caption[i + 1]``.
        caption_image: (M,) int32, the row of the image that a caption describes.
        origin: The file that the captions were read from, for messages.
        upright: Whether photographs are turned as their cameras marked them. False if masks lie on the stored pixels.
    """

    root: Path
    image_ids: Tensor
    paths: PackedStrings
    captions: PackedStrings
    caption_lengths: Tensor
    first_caption: Tensor
    caption_image: Tensor
    origin: str = ""
    upright: bool = False

    @classmethod
    def build(
        cls, root: str | Path, entries: Iterable[ImageEntry], *, origin: str | Path = "", upright: bool = False
    ) -> CaptionIndex:
        """Pack the entries of a reader.

        A caption without a word is left out, and so is an image without captions, which can neither be trained on nor
        scored; one line in the log counts both. Equal captions of one image are kept: they are two references.

        Args:
            root: The folder that image files are relative to.
            entries: The images of the split, in the order of their rows.
            origin: The file that the entries come from, for messages.
            upright: Whether photographs are turned as their cameras marked them.

        Raises:
            InputError: An image id appears twice or is out of range, a caption is too long or no text, or no caption is
                left.
        """
        image_ids: list[int] = []
        paths: list[str] = []
        counts: list[int] = []
        captions: list[str] = []
        for entry in entries:
            image_ids.append(entry.image_id)
            paths.append(entry.path)
            counts.append(len(entry.captions))
            captions += [" ".join(caption.split()) for caption in entry.captions]
        return cls.pack(root, image_ids, paths, counts, captions, origin=origin, upright=upright)

    @classmethod
    def pack(
        cls,
        root: str | Path,
        image_ids: Sequence[int],
        paths: Sequence[str],
        counts: Sequence[int] | NDArray[np.int64],
        captions: Sequence[str],
        *,
        origin: str | Path = "",
        upright: bool = False,
    ) -> CaptionIndex:
        """``build`` without an object per image, for large data sets.

        Args:
            root: The folder that image files are relative to.
            image_ids: The N images' numbers.
            paths: The N images' files.
            counts: (N,) captions per image.
            captions: Captions of the first image, then of the second, and so on, as a tokenizer returns them: one space
                between two words.
            origin: The file that the entries come from, for messages.
            upright: Whether photographs are turned as their cameras marked them.

        Raises:
            InputError: As ``build``.
        """
        name = str(origin) or str(root)
        row_of = dict(zip(image_ids, itertools.count()))  # the last row of each id
        if len(row_of) < len(image_ids):
            row = next(row_of[image_id] for row, image_id in enumerate(image_ids) if row_of[image_id] != row)
            raise InputError(f"{name}: image {image_ids[row]} appears twice ({paths[row]}); ids must be unique")
        for image_id in (min(image_ids, default=0), max(image_ids, default=0)):
            if not 0 <= image_id < 2**63:
                path = paths[row_of[image_id]]
                raise InputError(f"{name}: image ids must be in 0 .. 2^63 - 1, got {image_id} ({path})")
        owners = np.repeat(np.arange(len(paths)), counts)
        if empty := captions.count(""):
            owners = owners[np.fromiter(map(bool, captions), bool, len(captions))]
            captions = list(filter(None, captions))
        if not captions:
            raise InputError(f"{name}: holds no image with a caption")
        rows, owners, kept = np.unique(owners, return_inverse=True, return_counts=True)
        if bare := len(paths) - len(rows):
            image_ids, paths = [image_ids[row] for row in rows], [paths[row] for row in rows]
        if empty or bare:
            message = "%s: left out %d captions without a word and %d images without captions"
            logger.warning(message, name, empty, bare)
        lengths = np.fromiter(map(str.count, captions, itertools.repeat(" ")), np.int32, len(captions)) + 1
        if (longest := int(lengths.max())) > MAX_WORDS:
            raise InputError(
                f"{name}: image {image_ids[owners[lengths.argmax()]]} has a caption of {longest:,} words, more than "
                f"{MAX_WORDS}; cut it or leave it out"
            )
        try:
            packed_paths, packed_captions = PackedStrings.pack(paths), PackedStrings.pack(captions)
        except UnicodeEncodeError as error:  # JSON can hold half of a pair of surrogates
            message = f"{name}: {error.object!a:.80} is no text that UTF-8 can hold; mend or leave out the entry"
            raise InputError(message) from None
        return cls(
            root=Path(root),
            image_ids=torch.tensor(image_ids, dtype=torch.int64),
            paths=packed_paths,
            captions=packed_captions,
            caption_lengths=torch.from_numpy(lengths),
            first_caption=torch.from_numpy(np.r_[0, np.cumsum(kept)]),
            caption_image=torch.from_numpy(owners.astype(np.int32)),
            origin=name,
            upright=upright,
        )

    def __len__(self) -> int:
        return len(self.image_ids)

    def image_path(self, i: int) -> Path:
        """Return the file of image row ``i``."""
        return self.root / self.paths[i]

    def image(self, i: int, preprocessing: Preprocessing) -> Image:
        """Read the file of image row ``i``, for this preprocessing.

        Raises:
            InputError: It cannot be read.
        """
        return preprocessing.load(self.image_path(i), turn_upright=self.upright)

    def references(self, i: int) -> list[str]:
        """Return the captions of image row ``i``."""
        first, last = self.first_caption[i : i + 2].tolist()
        return [self.captions[j] for j in range(first, last)]

    def take(self, limit: int) -> CaptionIndex:
        """Return a copy of the first ``limit`` images with their captions; all of them if there are fewer."""
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
        """Move the tensors into shared memory, so that workers get no copies, and return the index."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                value.share_memory_()
            elif isinstance(value, PackedStrings):
                value.share_memory()
        return self

    def check_images(self, sample: int = 64) -> None:
        """Check that the files of ``sample`` images exist, spread evenly over the split.

        Checking all 120,000 images of COCO takes long on a network disk. A sample shows a forgotten download or a wrong
        folder; ``captioning prepare --check`` checks every file. The code that opens images calls this, readers
        do not, because training from cached features needs no images.

        Raises:
            InputError: A file is missing.
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
        tokenizer: Splits its captions into words; the data module sets its own.
    """

    tokenizer: Tokenizer = PennTreebank()

    @property
    def tokens(self) -> str:
        """A description of how captions are split into words."""
        return self.tokenizer.description

    @property
    def description(self) -> str:
        """What its images are, such as "the generated shapes", for a sentence that names the training data."""
        return f"the images of {type(self).__name__}"

    def prepare(self) -> None:
        """Generate the data or check that its files exist. Runs once per machine, before ``index``.

        Raises:
            InputError: A file is missing; says which, and what to run.
        """
        raise InputError(f"data.source: {type(self).__name__} must define prepare()")

    def index(self, split: str) -> CaptionIndex:
        """Return the images and captions of ``"train"``, ``"val"`` or ``"test"``.

        Raises:
            InputError: The files cannot be read, or have no such split.
        """
        raise InputError(f"data.source: {type(self).__name__} must define index()")

    def objects(self, split: str) -> ObjectLookup | None:
        """Return a lookup of the named objects in the split's images; None if the data set has no masks."""
        return None

    def attributes(self, split: str) -> AttributeJudge | None:
        """Return a judge of what captions of the split's images say; None if the data set does not know the truth."""
        return None


def read_annotations(path: Path, kind: type[Content], name: str, remedy: str) -> Content:
    """Return a JSON file as a msgspec struct; members that the struct lacks are skipped.

    Args:
        path: The file.
        kind: The struct.
        name: What the file should be, for messages ("COCO annotation file").
        remedy: What to do if the file is missing.

    Raises:
        InputError: It is missing, cannot be read or has another layout.
    """
    try:
        return msgspec.json.decode(read_bytes(path), type=kind)
    except FileNotFoundError:
        raise InputError(f"{path}: missing; {remedy}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not a {name} ({one_line(error)})") from error


def image_name(name: str, *, allow_outside: bool, where: str) -> str:
    """Return an image's name in an annotation file if it is a place inside the folder of the images.

    Args:
        name: The name in the file.
        allow_outside: Whether the user allows the file to name any place.
        where: The file and image, for messages.

    Raises:
        InputError: The name is an absolute path, leads out by ".." or holds a NUL character.
    """
    if "\0" in name:
        raise InputError(f"{where}: {name!r} is not the name of a file")
    plain = "/" not in name and "\\" not in name and ".." not in name
    if not plain and not allow_outside and (os.path.isabs(name) or ".." in Path(name).parts):
        raise InputError(
            f"{where}: {name!r} lies outside the folder of the images; if the file is to be trusted, set allow_outside "
            "of the data source"
        )
    return name


def check_split(split: str) -> None:
    """Raise an ``InputError`` unless ``split`` is one of ``SPLITS``."""
    if split not in SPLITS:
        raise InputError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
