"""Features written shard by shard, by one process or several."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from captioning.data.features.checksums import digest
from captioning.data.features.codes import DTYPES, encode
from captioning.data.features.layout import (
    Manifest,
    features_size,
    images_of_a_shard,
    publish,
    read_cache,
    refuse_other_encoder,
    share_of,
)
from captioning.errors import InputError
from captioning.files import replacing


class FeatureWriter:
    """Writes the shards of a split that are missing; a later writer goes on with those that are missing then.

    A shard is collected in memory and appears under its name when it is complete: a writer that is killed leaves none
    half written, and loses the images of the one it was collecting.

    Args:
        directory: the cache folder, created if missing.
        split: such as ``train``.
        paths: the images' paths, in row order.
        fingerprint: ``encoder.fingerprint()``.
        shape: (L, D) of one image.
        dtype: how numbers are kept, ``float16`` or ``uint8``.
        share: (i, n): write the i-th of n shares of the shards. Writers of different shares may work side by side.
        shard_images: images in a shard; by default as many as make 128 MiB of fp16.

    Attributes:
        rows: (n,) int64, the images of this share whose shards are missing, in the order in which they are written.
        total: images of this share.
        done: images of this share in finished shards.

    Raises:
        InputError: the folder holds another encoder's or other images' features, or the disk is too small.
    """

    def __init__(
        self,
        directory: str | Path,
        split: str,
        *,
        paths: Sequence[str],
        fingerprint: dict[str, Any],
        shape: tuple[int, int],
        dtype: str = "float16",
        share: tuple[int, int] = (0, 1),
        shard_images: int | None = None,
    ) -> None:
        locations, dim = shape
        shard_images = shard_images or images_of_a_shard(2 * locations * dim)
        wanted = Manifest(Path(directory), split, fingerprint, (len(paths), locations, dim), dtype, shard_images)
        self.split, self.shape, self.dtype = split, wanted.shape, dtype
        self._wanted, self._paths = wanted, list(paths)
        self.manifest = self._agreed() or wanted
        every = np.arange(self.manifest.shards)
        mine = every[share_of(every, share[1]) == share[0]].tolist()
        missing = [shard for shard in mine if not self.manifest.is_finished(shard)]
        if missing and self.manifest.finished_rows is not None:
            raise InputError(
                f"{self.manifest.path}: begun by an earlier version; delete it and {split}.npy.part, and extract again"
            )
        self.total = sum(len(self.manifest.rows(shard)) for shard in mine)
        rows = [np.asarray(self.manifest.rows(shard)) for shard in missing]
        self.rows: NDArray[np.int64] = np.concatenate([np.empty(0, np.int64), *rows])
        self.done = self.total - len(self.rows)
        self._written = 0  # of self.rows, those that were given to write()
        self._shard = torch.empty(0)
        self._begun = False
        self._clear(missing)
        self._check_space()

    def write(self, annotations: Tensor) -> None:
        """Take the annotations (B, L, D) of the next B of ``rows``; shards that are complete are written.

        Raises:
            InputError: a value does not fit into fp16 (beyond 65504, or not a number), or the disk is full.
        """
        half = annotations.half().cpu()
        if half.shape[1:] != self.shape[1:] or self._written + len(half) > len(self.rows):
            raise ValueError(f"annotations must be (B, {self.shape[1]}, {self.shape[2]}), got {tuple(half.shape)}")
        if not half.isfinite().all():
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
            now, half = half.split([min(len(half), size - place), max(0, len(half) - size + place)])
            self._shard[place : place + len(now)] = now
            self._written += len(now)
            if place + len(now) == size:
                self._save(shard)
                self.done += size

    @property
    def collected(self) -> int:
        """Images of this share in finished shards, and in the one that is being collected."""
        return self.total - len(self.rows) + self._written

    def _agreed(self) -> Manifest | None:
        """Return the manifest that is there.

        Raises:
            InputError: it is of other features.
        """
        wanted = self._wanted
        found = Manifest.read(wanted.directory, wanted.split)
        if found is None:
            return None
        refuse_other_encoder(found.path, found.fingerprint, wanted.fingerprint)
        if found.dtype != wanted.dtype:
            raise InputError(f"{found.path}: of --dtype {found.dtype}, not {wanted.dtype}; give another --output")
        if found.shape != wanted.shape or read_cache(found.images) != self._paths:
            raise InputError(f"{found.path}: made from other images; give another --output or delete the folder")
        return found

    def _save(self, shard: int) -> None:
        """Write the numbers first, then the record that says that they are complete."""
        if not self._begun:
            if not self.manifest.path.exists():
                self.manifest.write(self._paths)
            if self._agreed() != self.manifest:  # of a process that began at the same time
                raise InputError(f"{self.manifest.path}: another process has begun other features")
            self._begun = True
        scale = None
        numbers: NDArray[Any] = self._shard.numpy()
        if self.dtype == "uint8":
            numbers, scale = encode(self._shard)
        with replacing(self.manifest.array(shard), shared=True) as part, part.open("wb") as file:
            np.lib.format.write_array(file, numbers.astype(np.dtype(DTYPES[self.dtype]).newbyteorder("<"), copy=False))
        steps = {} if scale is None else {name: part.tolist() for name, part in scale._asdict().items()}
        publish(self.manifest.record(shard), {"sha256": digest(numbers, scale), **steps})

    def _clear(self, missing: list[int]) -> None:
        """Remove what a killed writer of this share left."""
        for shard in missing:
            for part in self.manifest.array(shard).parent.glob(f"{shard:05d}.*.part"):
                part.unlink(missing_ok=True)

    def _check_space(self) -> None:
        missing = features_size((len(self.rows), *self.shape[1:]), self.dtype)
        directory = self.manifest.directory
        directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(directory).free
        if free < missing:
            raise InputError(
                f"--output {directory}: {missing / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free; "
                "free some, give another folder, --dtype uint8, or choose an encoder with fewer or smaller annotations"
            )
