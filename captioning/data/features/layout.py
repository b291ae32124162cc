"""The manifest of a split: what its shards hold, where they lie, and which process has which."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from captioning.data.features.codes import DTYPES, Scale
from captioning.errors import InputError
from captioning.files import read_json, replacing

FORMAT = 2
HEADER_BYTES = 128  # NumPy pads the header of an array with so short a description to this
_SHARD_BYTES = 128 << 20


@dataclass(frozen=True)
class Manifest:
    """What a split's features are.

    Attributes:
        directory: the cache folder.
        split: such as ``train``.
        fingerprint: of the encoder.
        shape: (N, L, D).
        dtype: of ``DTYPES``.
        shard_images: images in a shard; the last one has the rest.
        finished_rows: of a file of an earlier version, the images that it has; None for shards.
    """

    directory: Path
    split: str
    fingerprint: dict[str, Any]
    shape: tuple[int, int, int]
    dtype: str
    shard_images: int
    finished_rows: int | None = None

    @property
    def path(self) -> Path:
        return self.directory / f"{self.split}.json"

    @property
    def images(self) -> Path:
        """The file of the images' paths."""
        return self.directory / f"{self.split}.images.json"

    @property
    def row_bytes(self) -> int:
        return np.dtype(DTYPES[self.dtype]).itemsize * math.prod(self.shape[1:])

    @property
    def shards(self) -> int:
        """How many there are."""
        return -(-self.shape[0] // self.shard_images)

    def rows(self, shard: int) -> range:
        return range(shard * self.shard_images, min(self.shape[0], (shard + 1) * self.shard_images))

    def array(self, shard: int) -> Path:
        """The file of a shard's numbers."""
        if self.finished_rows is not None:
            return self.directory / f"{self.split}.npy"
        return self.directory / self.split / f"{shard:05d}.npy"

    def record(self, shard: int) -> Path:
        """The file that says that a shard is complete."""
        return self.array(shard).with_suffix(".json")

    def is_finished(self, shard: int) -> bool:
        """Return whether a shard is there, and of the size that it must have."""
        try:
            size = self.array(shard).stat().st_size
        except OSError:
            return False
        if self.finished_rows is not None:
            return self.finished_rows >= self.shape[0]
        return size == HEADER_BYTES + self.row_bytes * len(self.rows(shard)) and self.record(shard).exists()

    def read_record(self, shard: int) -> Record:
        """Raises:
        InputError: it is missing or damaged.
        """
        if self.finished_rows is not None:
            return Record(None, None)
        path = self.record(shard)
        content = read_cache(path)
        try:
            digest, scale = content["sha256"], None
            if self.dtype == "uint8":
                scale = Scale(*(np.array(content[name], np.float32) for name in ("step", "offset")))
                if not all(part.shape == self.shape[2:] and np.isfinite(part).all() for part in scale):
                    raise ValueError
            if not isinstance(digest, str):
                raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{path}: damaged; delete it and extract again") from error
        return Record(digest, scale)

    @classmethod
    def read(cls, directory: Path, split: str) -> Manifest | None:
        """Return a split's manifest, None if there is none.

        Raises:
            InputError: it is damaged, or of a later version.
        """
        path = directory / f"{split}.json"
        if not path.exists():
            return None
        found = read_cache(path)
        if not isinstance(found, dict) or type(found.get("format")) is not int or found["format"] not in (1, FORMAT):
            raise InputError(f"{path}: not a feature cache of format 1 or {FORMAT}; delete it and extract again")
        single = found["format"] == 1
        fingerprint, shape = found.get("fingerprint"), found.get("shape")
        count = found.get("done" if single else "shard_images")
        sizes = [*(shape if isinstance(shape, list) else ()), count]
        if len(sizes) != 4 or not all(type(size) is int and 0 <= size < 2**40 for size in sizes):
            raise InputError(f"{path}: its shape or count of images is damaged; delete the folder and extract again")
        if not isinstance(fingerprint, dict) or not isinstance(fingerprint.get("grid_size"), list):
            raise InputError(f"{path}: names no encoder; delete the folder and extract again")
        n, locations, dim = sizes[:3]
        if single:
            return cls(directory, split, fingerprint, (n, locations, dim), "float16", max(1, n), count)
        if str(found.get("dtype")) not in DTYPES or not count:
            raise InputError(f"{path}: says of no known kind how numbers are kept; delete the folder and extract again")
        return cls(directory, split, fingerprint, (n, locations, dim), found["dtype"], count)

    def write(self, paths: list[str]) -> None:
        content = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "shard_images": self.shard_images,
        }
        publish(self.images, paths)
        publish(self.path, content)


@dataclass(frozen=True)
class Record:
    """What a shard's record says.

    Attributes:
        digest: SHA-256 of the numbers, and of the scale if there is one; None for a file of an earlier version.
        scale: of codes; None for fp16.
    """

    digest: str | None
    scale: Scale | None


def is_extracted(directory: Path, split: str) -> bool:
    """Return whether all features of a split are in the folder."""
    manifest = Manifest.read(directory, split)
    return manifest is not None and all(map(manifest.is_finished, range(manifest.shards)))


def images_of_a_shard(row_bytes: int) -> int:
    """Return how many make a file of about 128 MiB."""
    return max(1, _SHARD_BYTES // max(1, row_bytes))


def features_size(shape: tuple[int, int, int], dtype: str = "float16") -> int:
    """Bytes on disk of the features (N, L, D), headers and records left out."""
    return np.dtype(DTYPES[dtype]).itemsize * math.prod(shape)


def share_of(shards: NDArray[np.int64], shares: int) -> NDArray[np.int64]:
    """Return which of ``shares`` equal shares each shard belongs to, whoever writes or reads them.

    Every so-manieth: neighbouring images of a data set are sometimes alike.
    """
    return shards % shares


def view_fingerprint(fingerprint: dict[str, Any], *, upright: bool = False, flipped: bool = False) -> dict[str, Any]:
    """Return what features were made with: an encoder, and how it was shown the images.

    Args:
        fingerprint: of the encoder.
        upright: photographs were turned as their cameras marked them (``CaptionIndex.upright``).
        flipped: the images were mirrored.
    """
    return fingerprint | ({"upright": True} if upright else {}) | ({"flipped": True} if flipped else {})


def refuse_other_encoder(file: Path, made_with: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise an InputError naming each entry in which the two fingerprints differ."""
    differences = [
        f"{name} {made_with.get(name)!r} there, {expected.get(name)!r} here"
        for name in sorted(set(made_with) | set(expected))
        if made_with.get(name) != expected.get(name)
    ]
    if differences:
        raise InputError(
            f"{file}: features of another encoder ({'; '.join(differences)}); extract them again into another folder"
        )


def publish(path: Path, content: Any) -> None:
    """Write JSON that other processes may be writing, too."""
    with replacing(path, shared=True) as part:
        part.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def read_cache(path: Path) -> Any:
    return read_json(path, "delete the folder and extract again")
