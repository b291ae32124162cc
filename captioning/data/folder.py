"""A folder of images with a file of captions."""

from __future__ import annotations

import csv
import functools
import io
import os
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from captioning.data.records import CaptionIndex, CaptionSource, ImageEntry
from captioning.errors import InputError, one_line

_NAMES = {"image": ("file_name", "image_name"), "caption": ("text", "comment"), "split": ()}
"""What other data sets call our columns."""

_OWN = ("captions.jsonl", "captions.csv", "captions.txt")
_FOREIGN = ("metadata.jsonl", "metadata.csv", "flickr8k.token.txt", "results_20130124.token", "results.csv")
"""Files that are found without being named, the others if there is none of our own."""


class FolderSource(CaptionSource):
    """Images anywhere below a folder, and a file with one caption per line.

    The file is JSON lines (``{"image": "cats/1.jpg", "caption": "A cat asleep."}``) or CSV with a header. Its columns
    are ``image`` (relative to ``root``), ``caption`` and optionally ``split`` (train, val or test); others are ignored.
    Lines of one image need not be adjacent. Images are numbered in the order of first appearance.

    Without a ``split`` column an image's split follows from its name alone: of ten images about eight are for training,
    one for validation and one for the test, and new images never move old ones to another split.

    Also read are Hugging Face's ``metadata.jsonl`` or ``.csv`` with ``file_name`` and ``text``,
    ``Flickr8k.token.txt`` and Flickr30k's ``results.csv`` or ``.token``.

    Args:
        root: The folder.
        captions: The file, relative to ``root``; its name ends in .jsonl, .csv, .txt (CSV, too) or .token, .token.txt
            (Flickr's). By default ``captions.jsonl`` or ``captions.csv``, or one of the other data sets' files.
    """

    def __init__(self, root: str, *, captions: str | None = None) -> None:
        self.root = Path(root).expanduser()
        if captions is None:
            there = sorted(os.listdir(self.root)) if self.root.is_dir() else []
            usual = [[name for name in there if name.lower() in names] for names in (_OWN, _FOREIGN)]
            found = usual[0] or usual[1] or [_OWN[0]]
            if len(found) > 1:
                raise InputError(f"{root}: has {' and '.join(found)}; give captions, one of them")
            captions = found[0]
        self.captions = self.root / captions
        if self.captions.suffix.lower() not in (".jsonl", ".csv", ".txt", ".token"):
            raise InputError(f"{self.captions}: captions must be a .jsonl or .csv file, or Flickr's .token")

    def annotations(self) -> list[Path]:
        return [self.captions]

    def remedy(self) -> str:
        return "give the folder with captions.jsonl or captions.csv, or the file as captions (see data/README.md)"

    def index(self, split: str) -> CaptionIndex:
        self.prepare()
        entries: dict[str, ImageEntry] = {}
        split_of: dict[str, str] = {}
        real = functools.cache(lambda name: os.path.realpath(self.root / name))  # of every spelling, and of a link
        for line, row in _rows(self.captions):
            file = real(row.image)
            here = row.split or split_of.get(file) or hashed_split(row.image)
            if (above := split_of.setdefault(file, here)) != here:
                both = f"is in the {here} split here, in {above} above"
                raise InputError(f"{self.captions}: line {line}: {row.image} {both}")
            entry = entries.setdefault(file, ImageEntry(len(entries), row.image, []))
            if here == split:
                entry.captions.append(" ".join(self.tokenizer.tokenize(row.caption)))
        chosen = [entry for file, entry in entries.items() if split_of[file] == split]
        if not chosen:
            raise InputError(
                f"{self.captions}: none of {len(entries)} images is in the {split} split; write it in the split column "
                "of some. Without that column, val and test take one in ten images by their names"
            )
        return CaptionIndex.build(self.root, chosen, origin=self.captions)


def hashed_split(image: str) -> str:
    """Return the split of an image that no column assigns, a function of its name alone."""
    return {0: "val", 1: "test"}.get(zlib.crc32(Path(image).as_posix().encode()) % 10, "train")


class _Row(msgspec.Struct):
    image: Annotated[str, msgspec.Meta(min_length=1)]
    caption: str
    split: Literal["train", "val", "test"] | msgspec.UnsetType = msgspec.UNSET


def _rows(path: Path) -> Iterator[tuple[int, _Row]]:
    """Yield the captions of a file, each with the number of the line that it begins on."""
    lines, number = io.StringIO(_text(path), newline=""), 1
    first, token = lines.readline(), ".token" in path.name.lower()
    form: dict[str, Any] = {"strict": True, "skipinitialspace": True}
    lines.seek(0)
    try:
        if path.suffix.lower() == ".jsonl":
            for number, line in enumerate(lines, 1):
                if line.strip():
                    row = msgspec.json.decode(line, type=dict[str, Any])
                    yield number, msgspec.convert(dict(zip(_ours(row), row.values(), strict=True)), _Row)
            return
        if token or first.startswith("image_name|"):  # Flickr's, whose quotes are those of the captions
            form |= {"delimiter": "\t" if token else "|", "quoting": csv.QUOTE_NONE}
        table = csv.reader(lines, **form)
        columns = ["image", "caption"] if token else _columns(next(table, []))
        number = table.line_num + 1
        for cells in table:
            if len(cells) > len(columns):
                raise ValueError(f"has {len(cells)} columns, not {len(columns)}")
            if cells:
                row = dict(zip(columns, cells, strict=False))
                row["image"] = row["image"].partition("#")[0] if token else row["image"]
                yield number, msgspec.convert(row, _Row)
            number = table.line_num + 1
    except (csv.Error, ValueError, msgspec.MsgspecError) as error:
        quote = "a quote that opens here is not closed: " if isinstance(error, csv.Error) else ""
        raise InputError(
            f"{path}: line {number}: {quote}{one_line(error)}; a line has image, caption and perhaps split (train, "
            "val or test), separated by commas, a caption with commas in quotes"
        ) from error


def _text(path: Path) -> str:
    content = path.read_bytes()
    if b"\0" in content[:4]:
        raise InputError(f"{path}: line 1: is in UTF-16; save the file in UTF-8")
    try:
        return content.decode("utf-8-sig")  # spreadsheets write a byte order mark
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, content[error.start : error.start + 1]
        letter = byte.decode("cp1252", "replace")
        wrong = f"is not in UTF-8 (byte 0x{byte.hex()}, in Windows-1252 {letter!r})"
        raise InputError(f"{path}: line {line}: {wrong}; save the file in UTF-8") from error


def _ours(names: Collection[str]) -> list[str]:
    """Return the names of columns, ours in place of what others call them."""
    ours = {name: next((other for other in others if other in names), name) for name, others in _NAMES.items()}
    renamed = {other: name for name, other in ours.items() if name not in names}
    return [renamed.get(name, name) for name in names]


def _columns(names: list[str]) -> list[str]:
    """Return the names of a table's columns; a ValueError that quotes them if one is missing or there twice."""
    ours = _ours(names)
    for name in ("image", "caption"):
        if ours.count(name) != 1:
            wrong = f"{ours.count(name)} of them are called {name!r}"
            if len(names) == 1 and (marks := [mark for mark in ";\t|" if mark in names[0]]):
                wrong = f"{marks[0]!r} separates them, not a comma"
            raise ValueError(f"the columns are {', '.join(map(repr, names))}: {wrong}")
    return ours
