"""The checksum of a shard, which stands in its own header, and reading all shards to compare it.

The header is the one of any NumPy file, with a comment behind it: ``{'descr': '<f2', ..} # crc32 0123abcd``. So a shard
and its checksum appear at once, whichever processes write the split.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from captioning.data.features.layout import HEADER_BYTES, Manifest
from captioning.errors import InputError
from captioning.files import read_bytes
from captioning.progress import Progress


def header(manifest: Manifest, shard: int, numbers: memoryview) -> bytes:
    """Return the NumPy header of a shard of these numbers, with their checksum.

    The checksum includes the shard's number and the encoder, so a shard of another place is not taken for this one.
    """
    place = json.dumps([manifest.split, shard, manifest.fingerprint], sort_keys=True)
    checksum = zlib.crc32(numbers, zlib.crc32(place.encode()))
    shape = (len(manifest.rows(shard)), *manifest.shape[1:])
    text = f"{{'descr': '<f2', 'fortran_order': False, 'shape': {shape}, }} # crc32 {checksum:08x}"
    size = HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little") + text.ljust(size - 1).encode() + b"\n"


def verify(directory: Path) -> None:
    """Read every shard of a cache folder and compare it with its size and checksum.

    Raises:
        InputError: A shard is missing or damaged, or the folder holds no features.
    """
    files = directory.iterdir() if directory.is_dir() else ()
    splits = sorted({path.name.partition(".")[0] for path in files if path.is_dir() or path.suffix == ".json"})
    if not splits:
        raise InputError(f"--output {directory}: holds no features")
    problems = []
    for split in splits:
        manifest = Manifest.read(directory, split)
        if manifest is None:
            raise InputError(f"{directory / split}.json: missing; delete the folder and extract again")
        with Progress(split, manifest.shards, unit="shards") as progress:
            for shard in range(manifest.shards):
                if problem := _problem(manifest, shard):
                    problems.append(f"{manifest.array(shard)}: {problem}")
                    progress.say(problems[-1])
                progress.update(shard + 1)
        print(f"{split}: {manifest.shards} shards were read", flush=True)
    if problems:
        raise InputError(f"{problems[0]} (damaged shards: {len(problems)}); delete them and extract again")


def _problem(manifest: Manifest, shard: int) -> str:
    """Return what is wrong with a shard, "" if nothing is."""
    path, size = manifest.array(shard), manifest.shard_bytes(shard)
    try:
        if path.stat().st_size != size:
            return f"has {path.stat().st_size} bytes instead of {size}"
        content = read_bytes(path)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    # A view: a slice would copy the numbers.
    expected = header(manifest, shard, memoryview(content)[HEADER_BYTES:])
    return "" if content.startswith(expected) else "does not match its checksum"
