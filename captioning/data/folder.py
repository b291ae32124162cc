"""A folder of images with a file of captions."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from captioning.data.records import CaptionIndex, CaptionSource, ImageEntry
from captioning.errors import InputError, one_line


class FolderSource(CaptionSource):
    """Images anywhere below a folder, and a file with one caption per line.

    The file is JSON lines (``{"image": "cats/1.jpg", "caption": "A cat asleep."}``) or CSV with a header. Its columns
    are ``image`` (relative to ``root``), ``caption`` and optionally ``split`` (train, val or test); others are ignored.
    Lines of one image need not be adjacent. Images are numbered in the order of first appearance.

    Without a ``split`` column an image's split follows from its name alone: of ten images about eight are for training,
    one for validation and one for the test, and new images never move old ones to another split.

    Args:
        root: The folder.
        captions: The file, relative to ``root``; its name ends in .jsonl or .csv. By default ``captions.jsonl`` or
            ``captions.csv``, whichever exists.
    """

    def __init__(self, root: str, *, captions: str | None = None) -> None:
        self.root = Path(root)
        usual = [name for name in ("captions.jsonl", "captions.csv") if (self.root / name).is_file()]
        if captions is None and len(usual) > 1:
            raise InputError(f"{root}: has captions.jsonl and captions.csv; give captions, one of them")
        self.captions = self.root / (captions or [*usual, "captions.jsonl"][0])
        if self.captions.suffix not in (".jsonl", ".csv"):
            raise InputError(f"{self.captions}: captions must be a .jsonl or .csv file")

    def annotations(self) -> list[Path]:
        return [self.captions]

    def remedy(self) -> str:
        return "give the folder with captions.jsonl or captions.csv, or the file as captions (see data/README.md)"

    def index(self, split: str) -> CaptionIndex:
        self.prepare()
        entries: dict[str, ImageEntry] = {}
        split_of: dict[str, str] = {}
        for line, row in _rows(self.captions):
            here = row.split or split_of.get(row.image) or hashed_split(row.image)
            if (above := split_of.setdefault(row.image, here)) != here:
                both = f"is in the {here} split here, in {above} above"
                raise InputError(f"{self.captions}: line {line}: {row.image} {both}")
            entry = entries.setdefault(row.image, ImageEntry(len(entries), row.image, []))
            if here == split:
                entry.captions.append(" ".join(self.tokenizer.tokenize(row.caption)))
        chosen = [entry for image, entry in entries.items() if split_of[image] == split]
        if not chosen:
            raise InputError(
                f"{self.captions}: none of {len(entries)} images is in the {split} split; write it in the split column "
                "of some. Without that column, val and test take one in ten images by their names"
            )
        return CaptionIndex.build(self.root, chosen, origin=self.captions, upright=True)


def hashed_split(image: str) -> str:
    """Return the split of an image that no column assigns, a function of its name alone."""
    return {0: "val", 1: "test"}.get(zlib.crc32(Path(image).as_posix().encode()) % 10, "train")


class _Row(msgspec.Struct):
    image: Annotated[str, msgspec.Meta(min_length=1)]
    caption: str
    split: Literal["train", "val", "test"] | msgspec.UnsetType = msgspec.UNSET


def _rows(path: Path) -> Iterator[tuple[int, _Row]]:
    """Yield the captions of a file, each with the number of its line."""
    number = 0

    def lines() -> Iterator[str]:
        nonlocal number
        with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte order mark
            for number, line in enumerate(file, 1):  # noqa: B007
                yield line

    try:
        if path.suffix == ".csv":
            for row in csv.DictReader(lines(), strict=True):
                yield number, msgspec.convert(row, _Row)
        else:
            for line in filter(str.strip, lines()):
                yield number, msgspec.json.decode(line, type=_Row)
    except (csv.Error, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: line {number}: {one_line(error)}; a line has image, caption and perhaps split (train, val or "
            "test), in UTF-8, a caption with commas in quotes"
        ) from error
