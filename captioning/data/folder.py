"""A folder of images with a file of captions."""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from captioning.data.records import SPLITS, CaptionIndex, CaptionSource, ImageEntry, check_split
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
        self.captions = self.root / captions if captions is not None else _captions_file(self.root)
        if self.captions.suffix not in (".jsonl", ".csv"):
            raise InputError(f"{self.captions}: captions must be a .jsonl or .csv file")

    @property
    def description(self) -> str:
        return f"the images of {self.root.name}"

    def prepare(self) -> None:
        """Check that the captions file exists.

        Raises:
            InputError: It is missing.
        """
        if not self.captions.is_file():
            raise InputError(
                f"{self.captions}: missing; give the folder with captions.jsonl or captions.csv, or the file's name as "
                "captions (data/README.md says what it holds)"
            )

    def index(self, split: str) -> CaptionIndex:
        check_split(split)
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
                if split_of.setdefault(image, column or hashed_split(image)) != (column or split_of[image]):
                    raise InputError(f"{where}: {image} is in the {column} split here, in {split_of[image]} above")
                entry = entries.setdefault(image, ImageEntry(len(entries), image, []))
                if split_of[image] == split:
                    entry.captions.append(" ".join(self.tokenizer.tokenize(caption)))
        except UnicodeDecodeError as error:
            raise InputError(f"{self.captions}: not UTF-8 text ({error})") from error
        chosen = [entry for image, entry in entries.items() if split_of[image] == split]
        if not chosen:
            raise InputError(_empty(self.captions, split, len(entries), has_splits))
        return CaptionIndex.build(self.root, chosen, origin=self.captions, upright=True)


def _captions_file(root: Path) -> Path:
    """Return the file of captions in a folder, by its usual names.

    Raises:
        InputError: Both exist.
    """
    files = [root / name for name in ("captions.jsonl", "captions.csv") if (root / name).is_file()]
    if len(files) > 1:
        raise InputError(f"{root}: has captions.jsonl and captions.csv; give captions, one of them")
    return files[0] if files else root / "captions.jsonl"


def _empty(captions: Path, split: str, images: int, has_splits: bool) -> str:
    """Return what to do about a split without an image."""
    if has_splits:
        return f"{captions}: none of {images} images is in the {split} split; write {split} in the split column of some"
    return (
        f"{captions}: none of {images} images is in the {split} split, which takes one in ten by its name; "
        f"give more images, or a column split (train, val or test) with {split} for some"
    )


def hashed_split(image: str) -> str:
    """Return the split of an image that no column assigns, a function of its name alone."""
    bucket = zlib.crc32(Path(image).as_posix().encode()) % 10
    return {0: "val", 1: "test"}.get(bucket, "train")


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
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
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
