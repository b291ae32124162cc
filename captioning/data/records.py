"""One index for every data set: its images, their files, their tokenized captions, and named objects with masks."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar, get_args

import msgspec
import numpy as np

from captioning.data.images import load_image
from captioning.errors import InputError, check_whole, one_line, warn_once
from captioning.settings import Split
from captioning.tokenizers import PennTreebank, Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

    from captioning.data.transforms import Preprocessing

SPLITS: tuple[Split, ...] = get_args(Split)

Content = TypeVar("Content")


class ImageEntry(NamedTuple):
    """One image, as a reader yields it."""

    image_id: int  # the data set's own number, unique within a split
    path: str  # relative to the index's root; the index writes ./a//1.jpg as a/1.jpg
    captions: list[str]


class GroundedObject(NamedTuple):
    """One object of an image. Its mask is of the upright image or, after ``View.mask``, of a view."""

    noun: str  # in lower case; may be several words ("teddy bear")
    synonyms: frozenset[str]  # other names of the object, such as plurals
    attributes: frozenset[str]  # adjectives that are true of the object, one word each
    mask: np.ndarray  # (height, width) bool, the visible pixels


ObjectLookup = Callable[[Path], list[GroundedObject]]
"""Returns the objects of an image file; [] if none are known."""


class Phrase(NamedTuple):
    """A phrase of a caption, words start .. end - 1, and its region: a mask (height, width) of the upright image."""

    start: int
    end: int
    mask: np.ndarray


PhraseLookup = Callable[[Path, Sequence[str]], list[list[Phrase]]]
"""Returns the phrases of each caption of an image file; [] for a caption with none."""


@dataclass
class CaptionIndex:
    """One split of a data set: N images and their M captions. M is 0 for a test split without captions, like COCO's."""

    root: Path
    image_ids: np.ndarray  # (N,) int64, the data set's own numbers
    paths: list[str]  # N image files relative to ``root``
    captions: list[str]  # M tokenized captions, words joined by one space; captions of an image are neighbors
    first_caption: np.ndarray  # (N+1,) int64; image i has captions first_caption[i]:first_caption[i + 1]
    origin: str = ""  # the file that the captions were read from, for messages
    caption_lengths: np.ndarray = field(init=False)  # (M,) int64, words without <start> and <end>; at least 1
    caption_image: np.ndarray = field(init=False)  # (M,) int64, the row of the image that a caption describes

    def __post_init__(self) -> None:
        self.caption_lengths = np.array([caption.count(" ") + 1 for caption in self.captions], dtype=np.int64)
        self.caption_image = np.repeat(np.arange(len(self.paths)), np.diff(self.first_caption))

    @classmethod
    def build(
        cls,
        root: str | Path,
        entries: Iterable[ImageEntry],
        tokenizer: Tokenizer | None = None,
        *,
        origin: str | Path = "",
        uncaptioned: bool = False,
    ) -> CaptionIndex:
        """Return the index of a reader's images. Raises InputError if none has a caption or one appears twice.

        The tokenizer splits captions into words; without one, they are split at spaces. A caption without a word is
        left out. An image without captions is left out, too, except in an ``uncaptioned`` test split. A line in the log
        counts both. Equal captions of one image are kept: they are two references.
        """
        name, entries = str(origin or root), list(entries)
        split = str.split if tokenizer is None else tokenizer.tokenize
        all_texts = [[" ".join(words) for caption in entry.captions if (words := split(caption))] for entry in entries]
        images = [(entry, texts) for entry, texts in zip(entries, all_texts, strict=True) if texts or uncaptioned]
        if not images:
            raise InputError(f"{name}: holds no image{'' if uncaptioned else ' with a caption'}")
        captions = [text for _, texts in images for text in texts]
        wordless = sum(len(entry.captions) for entry in entries) - len(captions)
        if wordless or len(images) < len(entries):
            left_out = f"{wordless} captions without a word and {len(entries) - len(images)} images without captions"
            warn_once(f"{name}: left out {left_out}")
        counts = Counter(entry.image_id for entry, _ in images)
        if (twice := counts.most_common(1)[0])[1] > 1:
            raise InputError(f"{name}: image {twice[0]} appears twice, and would count twice; leave one entry")
        paths = [str(Path(entry.path)) for entry, _ in images]
        first = np.cumsum([0, *(len(texts) for _, texts in images)])
        return cls(Path(root), np.array([*counts], dtype=np.int64), paths, captions, first, name)

    def __len__(self) -> int:
        return len(self.paths)

    def image_path(self, row: int) -> Path:
        return self.root / self.paths[row]

    def image(self, row: int, preprocessing: Preprocessing) -> Image:
        """Return image ``row`` as this preprocessing reads it. Raises InputError if the file cannot be read."""
        return load_image(self.image_path(row), minimum_side=preprocessing.resize)

    def references(self, row: int) -> list[str]:
        return self.captions[self.first_caption[row] : self.first_caption[row + 1]]

    def take(self, limit: int | None) -> CaptionIndex:
        """Return the first ``limit`` images with their captions; all images if there are fewer or ``limit`` is None."""
        check_whole(1, limit_images=limit)
        ids, paths = self.image_ids[:limit], self.paths[:limit]
        first = self.first_caption[: len(ids) + 1]
        return CaptionIndex(self.root, ids, paths, self.captions[: first[-1]], first, self.origin)

    def check_images(self) -> None:
        """Raise InputError if image files are missing or empty. 120,000 files take three seconds on a local disk."""
        paths = map(self.image_path, range(len(self)))
        if missing := [path for path in paths if not (path.is_file() and path.stat().st_size)]:
            count = f"{len(missing):,} of the {len(self):,} image files of the split are missing or empty"
            raise InputError(f'{self.origin}: {count}, such as "{missing[0]}"; see data/README.md')


class CaptionSource(ABC):
    """A data set. Constructors take plain options, so that a YAML file can name a source."""

    tokenizer: Tokenizer = PennTreebank()
    """Splits captions into words. Before captions are encoded or scored with a vocabulary, assign the vocabulary's own:
    ``source.tokenizer = vocabulary.tokenizer``. The data module and ``evaluate_model`` do so."""

    def prepare(self) -> None:  # noqa: B027 - most data sets are there already
        """Generate the data set, if it is a generated one. `fit` calls this once per machine."""

    @abstractmethod
    def index(self, split: str) -> CaptionIndex:
        """Return the images and captions of "train", "val" or "test".

        Raises InputError if there are none, or if a file that the split's index, objects or phrases need is missing.
        """

    def objects(self, split: str) -> ObjectLookup | None:
        """Return a lookup of the objects in the split's images; None if the data set has no masks."""
        return None

    def phrases(self, split: str) -> PhraseLookup | None:
        """Return a lookup of phrases with regions in the split's captions; None if the data set has no such phrases."""
        return None


def read_annotations(path: Path, struct: type[Content], name: str, remedy: str) -> Content:
    """Return a JSON file as a msgspec struct. Raises InputError with the ``remedy`` if that fails."""
    try:
        return msgspec.json.decode(path.read_bytes().removeprefix(codecs.BOM_UTF8), type=struct)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = "missing" if isinstance(error, FileNotFoundError) else f"not a {name} ({one_line(error)})"
        raise InputError(f"{path}: {reason}; {remedy}") from error
