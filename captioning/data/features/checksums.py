"""The checksum of a shard, and reading all of them again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from captioning.data.features.codes import Scale
from captioning.data.features.layout import HEADER_BYTES, Manifest
from captioning.errors import InputError
from captioning.progress import Progress


def digest(numbers: NDArray[np.generic], scale: Scale | None) -> str:
    """Return the SHA-256 of a shard's numbers (n, L, D) and of their scale."""
    found = hashlib.sha256(np.ascontiguousarray(numbers).reshape(-1).view(np.uint8).data)
    for part in scale or ():
        found.update(part.astype("<f4").data)
    return found.hexdigest()


def verify(directory: Path) -> None:
    """Compare every shard of a cache folder with its checksum, and print what was found.

    Raises:
        InputError: a shard is damaged, or the folder holds no features.
    """
    splits = sorted(path.name.removesuffix(".images.json") for path in directory.glob("*.images.json"))
    manifests = [manifest for split in splits if (manifest := Manifest.read(directory, split))]
    if not manifests:
        raise InputError(f"--output {directory}: holds no features")
    damaged: list[Path] = []
    for manifest in manifests:
        if manifest.finished_rows is not None:
            print(f"{manifest.split}: of an earlier version, which kept no checksums")
            continue
        records = sorted((directory / manifest.split).glob("*.json"))
        there = [int(path.stem) for path in records if path.stem.isdecimal() and path.with_suffix(".npy").exists()]
        with Progress(manifest.split, len(there), unit="shards") as progress:
            for number, shard in enumerate(there, 1):
                if not _is_whole(manifest, shard):
                    damaged.append(manifest.array(shard))
                    progress.say(f"{manifest.array(shard)}: damaged")
                progress.update(number)
        print(f"{manifest.split}: {len(there)} of {manifest.shards} shards are here and were read", flush=True)
    if damaged:
        raise InputError(f"{damaged[0]}: damaged, as {len(damaged)} in all; delete and extract them again")


def _is_whole(manifest: Manifest, shard: int) -> bool:
    if shard >= manifest.shards or not manifest.is_finished(shard):
        return False
    try:
        record = manifest.read_record(shard)
        numbers = np.fromfile(manifest.array(shard), np.uint8, offset=HEADER_BYTES)
    except (InputError, OSError):
        return False
    return digest(numbers, record.scale) == record.digest
