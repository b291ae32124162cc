"""A folder of images with a file of captions."""

from __future__ import annotations

import csv
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from captioning.data.records import SPLITS, CaptionIndex, CaptionSource, ImageEntry, Split
from captioning.errors import InputError, one_line
from captioning.files import read_text

_NAMES = {"file_name": "image", "filename": "image", "text": "caption"}
"""Names of columns in other data sets, each with ours."""

_CAPTION_FILES = ("captions.jsonl", "captions.csv", "captions.txt", "metadata.jsonl", "metadata.csv")
"""Files that are read without the option ``captions``."""

_SPLIT_OF = {split: split for split in SPLITS} | {"valid": "val", "validation": "val", "dev": "val"}
"""Splits by the name of a folder or the value in the column."""


class FolderSource(CaptionSource):
    """Images anywhere below a folder, and a file with one caption per line.

    The file is JSON lines (``{"image": "cats/1.jpg", "caption": "A cat asleep."}``) or a table with a header, whose
    columns are separated by commas, semicolons or tabs. They are ``image`` (relative to ``root``), ``caption``
    and ``split`` (train, val or test), which may be empty or missing; others are ignored. Images are numbered in the
    order of first appearance.

    An image without a ``split``, in a folder ``validation`` (or ``val``) or ``test``, belongs to that split. A split
    that neither a folder nor a ``split`` names gets one in ten of the other images, by a hash of the path, so that a
    new image changes no other image's split. The rest is for training. With few images, a split may be empty.

    Also read: Hugging Face's ``metadata.jsonl`` or ``.csv`` with ``file_name`` and ``text``.

    Args:
        root: The folder.
        captions: The file, relative to ``root``; its name ends in .jsonl, .csv or .txt (CSV, too). By default one with
            a usual name, such as ``captions.jsonl`` or ``captions.csv``.
    """

    def __init__(self, root: str, *, captions: str | None = None) -> None:
        self.root = Path(root).expanduser()
        self.file = self.root / (captions or _CAPTION_FILES[0])
        if captions is None and self.root.is_dir():
            files = [file for file in sorted(self.root.iterdir()) if file.name.lower() in _CAPTION_FILES]
            if files[1:]:
                names = " and ".join(file.name for file in files)
                raise InputError(f"{self.root}: has {names}; give captions, one of them")
            self.file = files[0] if files else self.file
        if self.file.suffix.lower() not in (".jsonl", ".csv", ".txt"):
            raise InputError(f"{self.file}: captions must be a .jsonl, .csv or .txt file")

    def index(self, split: str) -> CaptionIndex:
        entries: dict[str, ImageEntry] = {}  # by normal path, because an image may have several spellings
        split_of: dict[str, str] = {}
        if not self.file.is_file():
            missing = self.file if self.root.is_dir() else f"{self.root}: no such folder; {self.file}"
            remedy = "give the folder with captions.jsonl or .csv as root, or another file in it as captions"
            raise InputError(f"{missing}: missing; {remedy}")
        for line, row in _rows(self.file):
            image = os.path.normpath(row.image)
            entries.setdefault(image, ImageEntry(len(entries), image, [])).captions.append(row.caption)
            if row.split and (earlier_split := split_of.setdefault(image, row.split)) != row.split:
                conflict = f"is in the {row.split} split here, in {earlier_split} above"
                raise InputError(f"{self.file}: line {line}: {row.image} {conflict}")
        by_folder = {image: _SPLIT_OF.get(image.split(os.sep)[0].lower(), "train") for image in entries}
        split_of = {image: name for image, name in by_folder.items() if name != "train"} | split_of
        named_splits = set(split_of.values())
        for image in entries.keys() - split_of:
            split_by_hash = hashed_split(image)
            split_of[image] = "train" if split_by_hash in named_splits else split_by_hash
        split_entries = [entry for image, entry in entries.items() if split_of[image] == split]
        if not split_entries:
            count = f"none of {len(entries)} images is in the {split} split"
            raise InputError(f"{self.file}: {count}; write it in the split column of some, or add images")
        return CaptionIndex.build(self.root, split_entries, self.tokenizer, origin=self.file)


def hashed_split(image: str) -> str:
    """Return the split that is drawn for an image, from its path alone."""
    return {0: "val", 1: "test"}.get(zlib.crc32(image.encode()) % 10, "train")


class _Row(msgspec.Struct):
    image: Annotated[str, msgspec.Meta(min_length=1)]
    caption: str
    split: Split | None = None


def _rows(path: Path) -> Iterator[tuple[int, _Row]]:
    """Yield the rows of a file, one for each caption, with the number of the line on which a row begins."""
    text = read_text(path)
    lines = io.StringIO(text, newline="")
    line_number = 1
    separator = max(",;\t", key=text.partition("\n")[0].count)
    is_json = path.suffix.lower() == ".jsonl"
    try:
        if is_json:
            for line_number, line in enumerate(lines, 1):
                if line.strip():
                    yield line_number, _convert_row(msgspec.json.decode(line, type=dict[str, Any]))
            return
        table = csv.DictReader(lines, delimiter=separator, skipinitialspace=True, strict=True)
        table.fieldnames = columns = [name.lower() for name in table.fieldnames or ()]
        for name in ("image", "caption"):
            if columns.count(name) > 1 or all(name not in (column, _NAMES.get(column)) for column in columns):
                raise ValueError(f"one column must be called {name!r}, got {columns}")
        line_number = table.line_num + 1
        for row in table:
            if extra_values := row.pop(None, ()):
                raise ValueError(f"has {len(columns) + len(extra_values)} columns, not {len(columns)}")
            yield line_number, _convert_row(row)
            line_number = table.line_num + 1
    except (csv.Error, ValueError, msgspec.MsgspecError) as error:
        quote = "a quote that opens here is not closed: " if isinstance(error, csv.Error) else ""
        in_quotes = "" if is_json else f", a caption with {separator!r} in quotes"
        form = f"a line has image, caption and perhaps split (train, val or test){in_quotes}"
        raise InputError(f"{path}: line {line_number}: {quote}{one_line(error)}; {form}") from error


def _convert_row(row: dict[str, Any]) -> _Row:
    """Return a row with our names of columns and splits, such as val for ``dev``. Raises MsgspecError."""
    row = {name: value for name, value in row.items() if value is not None}  # a line may end early
    row = {ours: row[other] for other, ours in _NAMES.items() if other in row} | row
    if split := row.pop("split", None):
        row["split"] = _SPLIT_OF.get(str(split).lower(), split)
    return msgspec.convert(row, _Row)
