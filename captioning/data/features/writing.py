"""Features written shard by shard, by one process or several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from captioning.data.features.checksums import header
from captioning.data.features.layout import (
    FORMAT,
    Manifest,
    crc32_of_paths,
    images_of_a_shard,
    refuse_other_encoder,
)
from captioning.errors import InputError
from captioning.files import replacing

_BEYOND_FP16 = 65520.0  # the smallest number that is rounded to infinity


class FeatureWriter:
    """Writes the missing shards of a split.

    A shard is collected in memory and gets its name when it is complete. A killed writer therefore leaves no half
    shard; the next one continues with the shards that are missing.

    Args:
        directory: The cache folder, created if missing.
        split: The split's name, such as ``train``.
        paths: The images' paths in row order.
        fingerprint: The encoder's fingerprint (``view_fingerprint``).
        shape: (L, D) of one image.
        process: (i, n): This is process i of n that run side by side. It writes every n-th shard, from the i-th on.
        shard_images: Images in a shard; by default as many as fill 128 MiB.

    Attributes:
        rows: (n,) int64, the images that this writer has to write, in order.
        total: Images of this process's shards, finished or not.
        done: Images of this process's finished shards.

    Raises:
        InputError: The folder holds the features of another encoder or of other images.
    """

    def __init__(
        self,
        directory: str | Path,
        split: str,
        *,
        paths: Sequence[str],
        fingerprint: dict[str, Any],
        shape: tuple[int, int],
        process: tuple[int, int] = (0, 1),
        shard_images: int | None = None,
    ) -> None:
        locations, dim = shape
        shard_images = shard_images or images_of_a_shard(2 * locations * dim)
        self._wanted = Manifest(
            Path(directory), split, fingerprint, (len(paths), locations, dim), shard_images, crc32_of_paths(paths)
        )
        self._paths = list(paths)
        self.split, self.shape = split, self._wanted.shape
        existing = self._existing()
        self.manifest = existing or self._wanted
        shards = range(process[0], self.manifest.shards, process[1])
        missing = [shard for shard in shards if existing is None or not existing.is_finished(shard)]
        self.total = sum(len(self.manifest.rows(shard)) for shard in shards)
        rows = [np.asarray(self.manifest.rows(shard)) for shard in missing]
        self.rows: NDArray[np.int64] = np.concatenate([np.empty(0, np.int64), *rows])
        self.done = self.total - len(self.rows)
        self._written = 0  # of self.rows, those that were given to write()
        self._shard = torch.empty(0)
        self._begun = False
        self._remove_leftovers(missing)

    def write(self, annotations: Tensor) -> None:
        """Take the annotations (B, L, D) of the next B of ``rows``, and write the shards that they complete.

        Raises:
            InputError: A value does not fit into fp16 (beyond 65504, or not a number), or the disk is full.
        """
        half = annotations.half().cpu()
        if half.shape[1:] != self.shape[1:] or self._written + len(half) > len(self.rows):
            raise ValueError(f"annotations must be (B, {self.shape[1]}, {self.shape[2]}), got {tuple(half.shape)}")
        low, high = annotations.aminmax() if annotations.numel() else (0, 0)
        if not (low > -_BEYOND_FP16 and high < _BEYOND_FP16):  # false for NaN, too
            rows = self.rows[self._written : self._written + len(half)]
            raise InputError(
                f"the encoder gives values beyond fp16's 65504 in images {rows[0]} to {rows[-1]} of {self.split}; "
                "train from the images instead"
            )
        while len(half):
            shard, place = divmod(int(self.rows[self._written]), self.manifest.shard_images)
            size = len(self.manifest.rows(shard))
            if not place:
                self._shard = torch.empty(size, *self.shape[1:], dtype=torch.float16)
            fits = min(len(half), size - place)
            self._shard[place : place + fits] = half[:fits]
            half = half[fits:]
            self._written += fits
            if place + fits == size:
                self._save(shard)
                self.done += size

    @property
    def collected(self) -> int:
        """Images of this process in finished shards and in the shard that is being collected."""
        return self.total - len(self.rows) + self._written

    def _existing(self) -> Manifest | None:
        """Return the folder's manifest; None if it has none.

        Raises:
            InputError: It describes other features.
        """
        wanted = self._wanted
        manifest = Manifest.read(wanted.directory, wanted.split)
        if manifest is None:
            return None
        refuse_other_encoder(manifest.path, manifest.fingerprint, wanted.fingerprint)
        if manifest.shape != wanted.shape or manifest.image_paths() != self._paths:
            raise InputError(f"{manifest.path}: made from other images; give another --output or delete the folder")
        return manifest

    def _save(self, shard: int) -> None:
        if not self._begun:
            self._begin()
        with replacing(self.manifest.array(shard), shared=True) as file, file.open("wb") as stream:
            numbers = self._shard.numpy().astype("<f2", copy=False)
            stream.write(header(self.manifest, shard, [numbers.data]))
            stream.write(numbers.data)

    def _begin(self) -> None:
        """Write the manifest unless another process has written the same one."""
        manifest = self.manifest
        if not manifest.path.exists():
            content = {
                "format": FORMAT,
                "fingerprint": manifest.fingerprint,
                "shape": list(manifest.shape),
                "shard_images": manifest.shard_images,
                "images_crc32": manifest.images_crc32,
            }
            _write_json(manifest.images, self._paths)
            _write_json(manifest.path, content)
        if self._existing() != manifest:
            raise InputError(f"{manifest.path}: another process has begun other features")
        self._begun = True

    def _remove_leftovers(self, missing: list[int]) -> None:
        """Remove the temporary files that a killed writer left."""
        for shard in missing:
            for file in self.manifest.array(shard).parent.glob(f"{shard:05d}.*.part"):
                file.unlink(missing_ok=True)


def _write_json(path: Path, content: Any) -> None:
    """Write JSON that other processes may be writing at the same time."""
    with replacing(path, shared=True) as file:
        file.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
