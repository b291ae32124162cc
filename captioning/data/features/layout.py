"""The manifest of a split's features: their shape, the encoder they come from, and the files that hold them."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from captioning.errors import InputError
from captioning.files import read_json

FORMAT = 3
HEADER_BYTES = 128
_SHARD_BYTES = 128 << 20


@dataclass(frozen=True)
class Manifest:
    """What a split's features are.

    Attributes:
        directory: The cache folder.
        split: The split's name, such as ``train``.
        fingerprint: The encoder's fingerprint (``view_fingerprint``).
        shape: (N, L, D) of the whole split.
        shard_images: Images in a shard; the last shard holds the rest.
        images_crc32: CRC-32 of the images' paths in row order; None leaves them unchecked.
    """

    directory: Path
    split: str
    fingerprint: dict[str, Any]
    shape: tuple[int, int, int]
    shard_images: int
    images_crc32: int | None

    @property
    def path(self) -> Path:
        return self.directory / f"{self.split}.json"

    @property
    def images(self) -> Path:
        """The file of the images' paths."""
        return self.directory / f"{self.split}.images.json"

    @property
    def image_bytes(self) -> int:
        """Bytes of one image's annotations."""
        return np.dtype(np.float16).itemsize * math.prod(self.shape[1:])

    @property
    def shards(self) -> int:
        """The number of shards."""
        return -(-self.shape[0] // self.shard_images)

    def rows(self, shard: int) -> range:
        """Return the rows of the split that a shard holds."""
        return range(shard * self.shard_images, min(self.shape[0], (shard + 1) * self.shard_images))

    def shard_shape(self, shard: int) -> tuple[int, int, int]:
        """Return (n, L, D) of a shard."""
        return len(self.rows(shard)), *self.shape[1:]

    def array(self, shard: int) -> Path:
        """Return the file of a shard."""
        return self.directory / self.split / f"{shard:05d}.npy"

    def is_finished(self, shard: int) -> bool:
        """Return whether the file of a shard exists and has the right size."""
        try:
            size = self.array(shard).stat().st_size
        except OSError:
            return False
        return size == self.shard_bytes(shard)

    def shard_bytes(self, shard: int) -> int:
        """Return the size of the file of a shard."""
        return HEADER_BYTES + self.image_bytes * len(self.rows(shard))

    @classmethod
    def read(cls, directory: Path, split: str) -> Manifest | None:
        """Return a split's manifest; None if the folder has none.

        Raises:
            InputError: The manifest is damaged or of another format.
        """
        path = directory / f"{split}.json"
        if not path.exists():
            return None
        content = read_cache(path)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise InputError(f"{path}: not a feature cache of format {FORMAT}; delete it and extract again")
        fingerprint, shape, shard_images = (content.get(name) for name in ("fingerprint", "shape", "shard_images"))
        sizes = [*(shape if isinstance(shape, list) else ()), shard_images]
        if len(sizes) != 4 or not all(type(size) is int and 0 <= size < 2**40 for size in sizes) or not shard_images:
            raise InputError(f"{path}: its shape or count of images is damaged; delete the folder and extract again")
        if not isinstance(fingerprint, dict) or not isinstance(fingerprint.get("grid_size"), list):
            raise InputError(f"{path}: names no encoder; delete the folder and extract again")
        shape = (sizes[0], sizes[1], sizes[2])
        return cls(directory, split, fingerprint, shape, sizes[3], content.get("images_crc32"))

    def image_paths(self) -> list[str]:
        """Return the images' paths in row order.

        Raises:
            InputError: They are damaged, so that an image would get another one's annotations.
        """
        paths = read_cache(self.images)
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise InputError(f"{self.images}: not a list of images; delete the folder and extract again")
        if self.images_crc32 not in (None, crc32_of_paths(paths)):
            raise InputError(f"{self.images}: does not match its checksum; delete the folder and extract again")
        if len(paths) != self.shape[0]:
            raise InputError(
                f"{self.path}: has {self.shape[0]:,} images where {self.images.name} names {len(paths):,}; delete the "
                "folder and extract again"
            )
        return paths


def crc32_of_paths(paths: Sequence[str]) -> int:
    return zlib.crc32(json.dumps(list(paths)).encode())


def is_extracted(directory: Path, split: str) -> bool:
    """Return whether the folder holds all features of a split."""
    manifest = Manifest.read(directory, split)
    return manifest is not None and all(map(manifest.is_finished, range(manifest.shards)))


def images_of_a_shard(image_bytes: int) -> int:
    """Return how many images fill a file of about 128 MiB."""
    return max(1, _SHARD_BYTES // max(1, image_bytes))


def flipped_split(split: str) -> str:
    """Return the name under which the features of a split's mirrored images are kept."""
    return f"{split}_flipped"


def view_fingerprint(fingerprint: dict[str, Any], *, upright: bool = False, flipped: bool = False) -> dict[str, Any]:
    """Return the fingerprint of an encoder together with how it was shown the images.

    Args:
        fingerprint: The encoder's own fingerprint.
        upright: Whether photographs were turned as their cameras marked them (``CaptionIndex.upright``).
        flipped: Whether the images were mirrored.
    """
    return fingerprint | ({"upright": True} if upright else {}) | ({"flipped": True} if flipped else {})


def refuse_other_encoder(file: Path, made_with: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise an InputError that names each entry in which the two fingerprints differ."""
    differences = [
        f"{name} {made_with.get(name)!r} there, {expected.get(name)!r} here"
        for name in sorted(set(made_with) | set(expected))
        if made_with.get(name) != expected.get(name)
    ]
    if differences:
        raise InputError(
            f"{file}: features of another encoder ({'; '.join(differences)}); extract them again into another folder"
        )


def read_cache(path: Path) -> Any:
    return read_json(path, "delete the folder and extract again")
