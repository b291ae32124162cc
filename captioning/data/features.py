"""A frozen encoder's annotations, computed once and read by memory mapping.

A folder holds, for each split:

    <split>.npy     (N, L, D) float16
    <split>.json    the encoder's fingerprint, the images' paths in row order, and how many of the rows are done

Features are computed with the *evaluation* preprocessing, so training from a cache always sees the same view of an
image, without random crops. ``<split>_flipped`` holds the mirrored images, if they were extracted. Values differ from
the encoder's by fp16 rounding (a relative 2**-11).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from captioning.errors import InputError, one_line
from captioning.files import read_json, write_json


def flipped_split(split: str) -> str:
    """Return the name under which the features of a split's mirrored images are kept."""
    return f"{split}_flipped"


def view_fingerprint(fingerprint: dict[str, Any], *, upright: bool = False, flipped: bool = False) -> dict[str, Any]:
    """Return the fingerprint of an encoder together with how it was shown the images.

    It may have seen photographs turned ``upright``, as their cameras marked them, or mirrored.
    """
    return fingerprint | ({"upright": True} if upright else {}) | ({"flipped": True} if flipped else {})


def create(
    folder: Path, split: str, fingerprint: dict[str, Any], paths: Sequence[str], shape: tuple[int, int]
) -> tuple[np.memmap[Any, Any], int]:
    """Return (rows, done): the file to write rows into, (N, L, D) float16, and how many an earlier call has written.

    The N images are named by ``paths``; ``shape`` is (L, D) of one of them.

    Raises:
        InputError: The folder holds the features of another encoder or of other images.
    """
    file, about = folder / f"{split}.npy", folder / f"{split}.json"
    if about.exists() and file.exists():
        content = _read(about, fingerprint)
        if content["paths"] != list(paths):
            raise InputError(f"{about}: made from other images; give another --output or delete the folder")
        return np.lib.format.open_memmap(file, "r+"), content["done"]
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.lib.format.open_memmap(file, "w+", np.dtype(np.float16), (len(paths), *shape))
    write_json(about, {"fingerprint": fingerprint, "done": 0, "paths": list(paths)}, indent=None)
    return rows, 0


def note(folder: Path, split: str, done: int) -> None:
    """Write down that the first ``done`` rows are written, for a later ``create``."""
    about = folder / f"{split}.json"
    write_json(about, read_json(about) | {"done": done}, indent=None)


class Features:
    """Cached annotations of one split's images, read only.

    Args:
        folder: The folder of the features.
        split: The split's name, such as ``train``.
        fingerprint: Fingerprint of the encoder that the cache stands in for (``view_fingerprint``).

    Attributes:
        rows: (N, L, D) float16, mapped from the disk.

    Raises:
        InputError: The features are missing or incomplete, or were made by another encoder, other weights or another
            preprocessing; the message says which.
    """

    def __init__(self, folder: str | Path, split: str, fingerprint: dict[str, Any]) -> None:
        self._arguments = folder, split, fingerprint
        self._about, file = Path(folder) / f"{split}.json", Path(folder) / f"{split}.npy"
        if not self._about.exists():
            raise InputError(
                f"{self._about}: no features; run captioning extract with --split {split.removesuffix('_flipped')}, or "
                "give --data.features null to compute them from the images"
            )
        content = _read(self._about, fingerprint)
        self._row_of = {path: row for row, path in enumerate(content["paths"])}
        if (done := content["done"]) < (images := len(content["paths"])):
            raise InputError(f"{self._about}: only {done:,} of {images:,} images are done; finish captioning extract")
        try:
            self.rows = np.asarray(np.load(file, mmap_mode="r"))
        except (OSError, ValueError) as error:
            raise InputError(f"{file}: cannot be read ({one_line(error)}); delete it and extract again") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments  # a spawned worker maps the file itself

    def find(self, paths: Iterable[str]) -> np.ndarray:
        """Return the rows (n,) int64 of the images at ``paths``, named as in ``CaptionIndex.paths``.

        Raises:
            InputError: An image is not in the cache.
        """
        try:
            return np.array([self._row_of[path] for path in paths], dtype=np.int64)
        except KeyError as error:
            raise InputError(
                f"{self._about}: has no features of image {error.args[0]}; it was made from other data, extract again"
            ) from None

    def gather(self, rows: Sequence[int] | np.ndarray | Tensor) -> Tensor:
        """Return a copy of the annotations (B, L, D) half of the images in these rows (B,)."""
        return torch.from_numpy(self.rows[np.asarray(rows, dtype=np.int64)])


def _read(about: Path, fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON beside the features, after a look at the encoder that they come from."""
    content: dict[str, Any] = read_json(about, "delete the folder and extract again")
    if "done" not in content:
        raise InputError(f"{about}: features of an earlier version; delete the folder and extract again")
    there, here = content["fingerprint"], json.loads(json.dumps(fingerprint))  # tuples become lists
    differences = [
        f"{name} {there.get(name)!r} there, {here.get(name)!r} here"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    ]
    if differences:
        raise InputError(
            f"{about}: features of another encoder ({'; '.join(differences)}); extract them again into another folder"
        )
    return content
