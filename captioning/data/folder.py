"""A folder of images with a file of captions."""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from captioning.data.records import SPLITS, CaptionIndex, CaptionSource, ImageEntry
from captioning.errors import InputError


class FolderSource(CaptionSource):
    """Images anywhere below a folder, and a file with one caption per line.

    The file is JSON lines (``{"image": "cats/1.jpg", "caption": "A cat asleep."}``) or CSV with a header. Its columns
    are ``image`` (relative to ``root``), ``caption`` and optionally ``split`` (train, val or test); others are ignored.
    Lines of one image need not be adjacent. Images are numbered in the order of first appearance, so appended lines
    renumber nothing.

    Without a ``split`` column an image's split follows from its name alone: of ten images about eight are for training,
    one for validation and one for the test. The same image is in the same split on every machine, and new images
    never move old ones from one split to another.

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
        return (
            "give the folder with captions.jsonl or captions.csv, or the file's name as captions (see data/README.md)"
        )

    def index(self, split: str) -> CaptionIndex:
        self.prepare()
        entries: dict[str, ImageEntry] = {}
        split_of: dict[str, str] = {}
        has_splits = False
        read = _read_jsonl if self.captions.suffix == ".jsonl" else _read_csv
        try:
            for line, row in read(self.captions):
                where = f"{self.captions}: line {line}"
                image, caption, column = _fields(row, where)
                has_splits = has_splits or column is not None
                here = column or split_of.get(image) or hashed_split(image)
                if split_of.setdefault(image, here) != here:
                    raise InputError(f"{where}: {image} is in the {here} split here, in {split_of[image]} above")
                entry = entries.setdefault(image, ImageEntry(len(entries), image, []))
                if here == split:
                    entry.captions.append(" ".join(self.tokenizer.tokenize(caption)))
        except UnicodeDecodeError as error:
            raise InputError(f"{self.captions}: not UTF-8 text ({error})") from error
        chosen = [entry for image, entry in entries.items() if split_of[image] == split]
        if not chosen:
            advice = (
                f"; write {split} in the split column of some"
                if has_splits
                else ", which takes one in ten by its name; give more images, or a column split (train, val or test)"
            )
            raise InputError(f"{self.captions}: none of {len(entries)} images is in the {split} split{advice}")
        return CaptionIndex.build(self.root, chosen, origin=self.captions, upright=True)


def hashed_split(image: str) -> str:
    """Return the split of an image that no column assigns, a function of its name alone."""
    return {0: "val", 1: "test"}.get(zlib.crc32(Path(image).as_posix().encode()) % 10, "train")


def _fields(row: dict[str, Any], where: str) -> tuple[str, str, str | None]:
    image, caption, split = row.get("image"), row.get("caption"), row.get("split")
    if not isinstance(image, str) or not image:
        raise InputError(f"{where} has no image")
    if not isinstance(caption, str):
        raise InputError(f"{where}: {image} has no caption; a line holds one caption, as text")
    if "split" in row and split not in SPLITS:
        raise InputError(f"{where}: split must be one of {', '.join(SPLITS)}, got {split!r}")
    return image, caption, split


def _read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(f"{path}: line {number} is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise InputError(f'{path}: line {number} must be an object like {{"image": .., "caption": ..}}')
            yield number, row


def _read_csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte order mark
        reader = csv.DictReader(file, strict=True)
        try:
            columns = reader.fieldnames or []
            missing = [name for name in ("image", "caption") if name not in columns]
            if missing:
                raise InputError(f"{path}: has no column {' and no column '.join(missing)}, only {', '.join(columns)}")
            for row in reader:
                if None in row:
                    raise InputError(f"{path}: line {reader.line_num} has too many fields; quote a caption with commas")
                yield reader.line_num, row
        except csv.Error as error:
            raise InputError(f"{path}: line {reader.reader.line_num} is not CSV ({error})") from error
