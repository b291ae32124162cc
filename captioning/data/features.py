"""A frozen encoder's annotations, computed once and read by memory mapping.

A folder holds two files for each split. <split>.npy has the annotations (N, L, D) float16, computed from the view of
*evaluation*, without random crops. <split>.json has the encoder's identity, the images' paths in row order, and the
number of rows that are done.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from captioning.errors import InputError
from captioning.files import read_json


def features_key(split: str, identity: dict[str, Any], *, mirrored: bool = False) -> tuple[str, dict[str, Any]]:
    """Return the name of a split's features and their identity: the encoder's, and whether images were mirrored."""
    return (f"{split}_flipped", identity | {"flipped": True}) if mirrored else (split, identity)


class Features:
    """Cached annotations of one split's images, mapped from the disk.

    ``split`` and ``identity`` come from ``features_key``; ``paths`` are the ``CaptionIndex.paths`` of the N images.
    Raises InputError if the features are missing or incomplete, or of another encoder, other weights or preprocessing.
    """

    def __init__(self, folder: str | Path, split: str, identity: dict[str, Any], paths: Sequence[str]) -> None:
        self._arguments = folder, split, identity, paths
        json_path, file = Path(folder) / f"{split}.json", Path(folder) / f"{split}.npy"
        if not json_path.exists():
            command = f"captioning extract with --split {split.replace('_flipped', ' --flipped')}"
            raise InputError(f"{json_path}: no features; run {command}, or give --data.features null to do without")
        content = read_features_json(json_path, identity)
        if (done := content["done"]) < (images := len(content["paths"])):
            raise InputError(f"{json_path}: only {done:,} of {images:,} images are done; finish captioning extract")
        row_of = {path: row for row, path in enumerate(content["paths"])}
        if missing := [path for path in paths if path not in row_of]:
            raise InputError(f"{json_path}: has no features of image {missing[0]}, it is of other data; extract again")
        self._file_rows = np.array([row_of[path] for path in paths], dtype=np.int64)
        self._annotations = np.asarray(np.load(file, mmap_mode="r"))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments  # a spawned worker maps the file itself

    def gather(self, rows: np.ndarray) -> Tensor:
        """Return a copy of the annotations (B, L, D) float16 of the images at ``rows`` (B,) of ``paths``."""
        return torch.from_numpy(self._annotations[self._file_rows[rows]])


def read_features_json(json_path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON beside features. Raises InputError if another encoder made them."""
    content: dict[str, Any] = read_json(json_path, "delete the folder and extract again")
    old, new = content.get("fingerprint", {}), json.loads(json.dumps(identity))  # tuples become lists
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    if names or "done" not in content:
        values = "; ".join(f"{name} {old.get(name)!r} there, {new.get(name)!r} here" for name in names)
        raise InputError(f"{json_path}: features of another encoder ({values}); extract again, into another folder")
    return content
