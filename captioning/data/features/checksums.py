"""The checksum of a shard, which stands in its own header, and reading all shards to compare it.

The header is the one of any NumPy file, with a comment behind it: ``{'descr': '<f2', ..} # crc32 0123abcd``. So a shard
and its checksum appear at once, whichever processes write the split.
"""

from __future__ import annotations

import functools
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

from captioning.data.features.layout import HEADER_BYTES, Manifest
from captioning.errors import InputError, printable
from captioning.files import regular
from captioning.progress import Progress

_BLOCK = 1 << 20
"""Bytes that are read at a time: they are still in the processor's cache when they are summed."""


def header(manifest: Manifest, shard: int, numbers: Iterable[bytes | memoryview]) -> bytes:
    """Return the NumPy header of a shard of these numbers, which come in blocks, with their checksum.

    The checksum includes the shard's number and the encoder, so a shard of another place is not taken for this one.
    """
    place = json.dumps([manifest.split, shard, manifest.fingerprint], sort_keys=True)
    checksum = functools.reduce(lambda before, block: zlib.crc32(block, before), numbers, zlib.crc32(place.encode()))
    text = (
        f"{{'descr': '<f2', 'fortran_order': False, 'shape': {manifest.shard_shape(shard)}, }} # crc32 {checksum:08x}"
    )
    size = HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little") + text.ljust(size - 1).encode() + b"\n"


def damage_of(manifest: Manifest, shard: int) -> str:
    """Read a shard and return what is wrong with it, "" if nothing is."""
    path, size = manifest.array(shard), manifest.shard_bytes(shard)
    try:
        with open(path, "rb", opener=regular) as file:
            if (there := os.fstat(file.fileno()).st_size) != size:
                return f"has {there} bytes instead of {size}"
            start = file.read(HEADER_BYTES)
            expected = header(manifest, shard, iter(lambda: file.read(_BLOCK), b""))
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if start == expected else "does not match its checksum"


def verify(directory: Path) -> None:
    """Read every shard of a cache folder and compare it with its size and checksum.

    Raises:
        InputError: A shard or the list of images is missing or damaged, or the folder holds no features.
    """
    files = directory.iterdir() if directory.is_dir() else ()
    splits = sorted(
        {path.name.partition(".")[0] for path in files if path.suffix == ".json" or any(path.glob("*.npy"))}
    )
    if not splits:
        raise InputError(f"--output {directory}: holds no features")
    problems = []
    for split in splits:
        manifest = Manifest.read(directory, split)
        if manifest is None:
            raise InputError(f"{directory / split}.json: missing; delete the folder and extract again")
        manifest.image_paths()
        with Progress(split, manifest.shards, unit="shards") as progress:
            for shard in range(manifest.shards):
                if problem := damage_of(manifest, shard):
                    problems.append(f"{manifest.array(shard)}: {problem}")
                    progress.say(problems[-1])
                progress.update(shard + 1)
        print(f"{printable(split)}: {manifest.shards} shards were read", flush=True)
    if problems:
        raise InputError(f"{problems[0]} (damaged shards: {len(problems)}); delete them and extract again")
