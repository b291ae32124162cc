"""A folder of images with a file of captions."""

from __future__ import annotations

import csv
import glob
import io
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from captioning.data.records import SPLITS, CaptionIndex, CaptionSource, ImageEntry, Split
from captioning.errors import InputError, one_line, warn_once
from captioning.files import read_text

_NAMES = dict.fromkeys(("file_name", "filename", "image_name"), "image") | {"text": "caption", "comment": "caption"}
"""Names of columns in other data sets, and ours."""

_CAPTION_FILES = ("captions.jsonl", "captions.csv", "captions.txt")
_FOREIGN_FILES = ("metadata.jsonl", "metadata.csv", "flickr8k.token.txt", "results_20130124.token", "results.csv")
"""Files that are read without the option ``captions``; another data set's only if none of ours exists."""

_SPLIT_OF = {split: split for split in SPLITS} | {"valid": "val", "validation": "val", "dev": "val"}
"""Splits by name of a folder, or in the column."""

_UNPUBLISHED = "2258277193_586949ec62.jpg.1"
"""An image that Flickr8k's captions describe and its archive lacks."""


class FolderSource(CaptionSource):
    """Images anywhere below a folder, and a file with one caption per line.

    The file is JSON lines (``{"image": "cats/1.jpg", "caption": "A cat asleep."}``) or a table with a header, whose
    columns are separated by commas, semicolons, tabs or bars. They are ``image`` (relative to ``root``), ``caption``
    and ``split`` (train, val or test), which may be empty or missing; others are ignored. Images are numbered in the
    order of first appearance.

    Without a ``split`` column, an image in a folder ``train``, ``validation`` (or ``val``) or ``test`` belongs to that
    split. A hash of the image's name draws the splits without a folder: one image in ten for validation, one for the
    test. New images do not move the others. If a split is empty and there are three images or more, it gets a tenth
    of the images that the hash drew for the largest split, at least one. An empty training split gets eight tenths.

    Also read: Hugging Face's ``metadata.jsonl`` or ``.csv`` with ``file_name`` and ``text``; ``Flickr8k.token.txt`` and
    Flickr30k's ``results.csv`` or ``.token``, whose images may lie in a folder beside the file. Known errors in the
    published files are corrected and logged. Each split's folder may have its own file.

    Args:
        root: The folder.
        captions: The file, relative to ``root``; its name ends in .jsonl, .csv, .txt (CSV, too) or .token, .token.txt
            (Flickr's). By default ``captions.jsonl`` or ``captions.csv``, or one of the other data sets' files.
    """

    def __init__(self, root: str, *, captions: str | None = None) -> None:
        self.root = Path(root).expanduser()
        self.files = [self.root / (captions or _CAPTION_FILES[0])]
        if captions is None and self.root.is_dir():
            inside = [folder for folder in sorted(self.root.iterdir()) if folder.name.lower() in _SPLIT_OF]
            split_files = [file for folder in inside for file in _captions_of(folder)]
            self.files = _captions_of(self.root) or split_files or self.files
        self._base = None if captions is None else self.root  # folder of the images; by default each file's folder
        for file in self.files:
            if file.suffix.lower() not in (".jsonl", ".csv", ".txt", ".token"):
                raise InputError(f"{file}: captions must be a .jsonl, .csv or .txt file, or Flickr's .token")

    def index(self, split: str) -> CaptionIndex:
        entries: dict[str, ImageEntry] = {}  # by normal path, because an image may have several spellings
        listed_names: dict[str, str] = {}  # the name of each image in its file
        split_of: dict[str, str] = {}
        for file in self.files:
            if not file.is_file():
                raise InputError(
                    f"{file}: missing; give the folder with captions.jsonl or .csv, or the file as captions"
                )
            for line, name, row in self._named_rows(file):
                image = os.path.normpath(name)
                entries.setdefault(image, ImageEntry(len(entries), name, [])).captions.append(row.caption)
                listed_names.setdefault(image, row.image)
                if row.split and (earlier_split := split_of.setdefault(image, row.split)) != row.split:
                    conflict = f"is in the {row.split} split here, in {earlier_split} above"
                    raise InputError(f"{file}: line {line}: {row.image} {conflict}")
        if not entries:
            raise InputError(f"{self.files[0]}: holds no caption")
        folders = {image: image.split(os.sep)[0].lower() for image in entries}
        by_folder = {image: _SPLIT_OF[folder] for image, folder in folders.items() if folder in _SPLIT_OF}
        split_of = {image: name for image, name in by_folder.items() if name != "train"} | split_of
        unassigned = sorted(entries.keys() - split_of, key=lambda image: (_hash(image), image))
        for image in unassigned:
            by_hash = hashed_split(listed_names[image])
            split_of[image] = "train" if by_hash in by_folder.values() else by_hash
        _fill_splits(split_of, unassigned)
        origin = self.root if self.files[1:] else self.files[0]
        split_entries = [entry for image, entry in entries.items() if split_of[image] == split]
        if not split_entries:
            remedy = "add images, three or more are split automatically; or " if unassigned and len(entries) < 3 else ""
            remedy += "write it in the split column of some"
            raise InputError(f"{origin}: none of {len(entries)} images is in the {split} split; {remedy}")
        return CaptionIndex.build(self.root, split_entries, self.tokenizer, origin=origin)

    def _named_rows(self, captions: Path) -> Iterator[tuple[int, str, _Row]]:
        """Yield the line, the image's name below the root, and the caption of each row of a file."""
        base, rows = self._base or captions.parent, list(_rows(captions))
        first = rows[0][1].image if rows else ""
        if not (base / first).exists():  # the images may lie in a folder beside their file
            base = next((image.parent for image in base.glob(f"*/{glob.escape(first)}")), base)
        prefix = "" if base == self.root else f"{base.relative_to(self.root).as_posix()}/"
        for line, row in rows:
            if row.image != _UNPUBLISHED or (base / row.image).exists():
                yield line, prefix + row.image, row
            else:
                warn_once(f"{captions}: left out {_UNPUBLISHED}, which the archive of its images lacks")


def _captions_of(folder: Path) -> list[Path]:
    """Return the captions file of a folder, [] if none has a usual name."""
    inside = sorted(os.listdir(folder)) if folder.is_dir() else []
    own, foreign = ([name for name in inside if name.lower() in names] for names in (_CAPTION_FILES, _FOREIGN_FILES))
    if len(names := own or foreign) > 1:
        raise InputError(f"{folder}: has {' and '.join(names)}; give captions, one of them")
    return [folder / name for name in names]


def hashed_split(image: str) -> str:
    """Return the split of an image without a split column, from its name alone."""
    return {0: "val", 1: "test"}.get(_hash(image) % 10, "train")


def _fill_splits(split_of: dict[str, str], unassigned: Sequence[str]) -> None:
    """Move ``unassigned`` images of the largest split into an empty split, as ``FolderSource`` says."""
    for split in SPLITS if len(split_of) > 2 else ():
        if split not in split_of.values():
            largest = max(([image for image in unassigned if split_of[image] == other] for other in SPLITS), key=len)
            count = max(1, len(largest) * (8 if split == "train" else 1) // 10)
            split_of |= dict.fromkeys(largest[:count] if largest[1:] else (), split)


def _hash(image: str) -> int:
    return zlib.crc32(Path(image).as_posix().encode())


class _Row(msgspec.Struct):
    image: Annotated[str, msgspec.Meta(min_length=1)]
    caption: str
    split: Split | None = None


def _rows(path: Path) -> Iterator[tuple[int, _Row]]:
    """Yield each caption of a file with the line that it begins on."""
    text, is_token = read_text(path), ".token" in path.name.lower()
    if is_flickr30k := text.startswith("image_name|"):
        # The published file has one such line: "2199200615.jpg| 4   A dog runs across the grass ."
        text, mended = re.subn(r"(?m)^([^|\n]+\| *\d+)(?= +[^|\s])", r"\1|", text)
        if mended:
            warn_once(f"{path}: lines without the bar before the caption, read as if they had it: {mended}")
    lines, number = io.StringIO(text, newline=""), 1
    separator = "\t" if is_token else max(",;\t|", key=text.partition("\n")[0].count)
    is_json = path.suffix.lower() == ".jsonl"
    in_quotes = "" if is_json else f", a caption with {separator!r} in quotes"
    try:
        if is_json:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _converted(msgspec.json.decode(line, type=dict[str, Any]))
            return
        # Quotes belong to the captions in Flickr's files.
        quoting = csv.QUOTE_NONE if is_token or is_flickr30k else csv.QUOTE_MINIMAL
        form: dict[str, Any] = {"delimiter": separator, "quoting": quoting, "skipinitialspace": True, "strict": True}
        table = csv.DictReader(lines, ["image", "caption"] if is_token else None, **form)
        table.fieldnames = columns = [name.lower() for name in table.fieldnames or ()]
        for name in ("image", "caption"):
            if columns.count(name) > 1 or all(name not in (column, _NAMES.get(column)) for column in columns):
                count = "no column is" if columns.count(name) == 0 else "several columns are"
                raise ValueError(f"{count} called {name!r}: {', '.join(map(repr, columns)) or 'the line is empty'}")
        number = table.line_num + 1
        for row in table:
            if others := row.pop(None, ()):
                raise ValueError(f"has {len(columns) + len(others)} columns, not {len(columns)}")
            if is_token:
                row["image"] = row["image"].partition("#")[0]
            yield number, _converted(row)
            number = table.line_num + 1
    except (csv.Error, ValueError, msgspec.MsgspecError) as error:
        quote = "a quote that opens here is not closed: " if isinstance(error, csv.Error) else ""
        if is_token or is_flickr30k:
            line_of = "image#number, a tab and a caption" if is_token else "image_name| comment_number| comment"
        else:
            line_of = f"image, caption and perhaps split (train, val or test){in_quotes}"
        raise InputError(f"{path}: line {number}: {quote}{one_line(error)}; a line has {line_of}") from error


def _converted(row: dict[str, Any]) -> _Row:
    """Return a row with our names of columns and splits, such as val for ``dev``. Raises MsgspecError."""
    row = {name: value for name, value in row.items() if value is not None}  # a line may end early
    for other, name in _NAMES.items():
        if other in row:
            row.setdefault(name, row.pop(other))
    if isinstance(image := row.get("image"), str):
        row["image"] = image.replace("\\", "/")  # as written on Windows
    if split := row.pop("split", None):
        row["split"] = _SPLIT_OF.get(str(split).lower(), split)
    return msgspec.convert(row, _Row)
