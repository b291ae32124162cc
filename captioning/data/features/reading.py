"""Cached features as training reads them."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from captioning.data.features.codes import DTYPES, Scale, decode
from captioning.data.features.layout import Manifest, read_cache, refuse_other_encoder, share_of
from captioning.errors import InputError

_TRUSTED = 8
"""Batches in a row that came without a disk, after which the system is not told what comes until one needs it."""


class _Shard(NamedTuple):
    """A mapped file: (n, L, D) float16, or uint8 with a scale."""

    numbers: NDArray[Any]
    scale: Scale | None


class _Run(NamedTuple):
    """Neighbouring images of one shard."""

    shard: int
    first: int
    images: int


class FeatureCache:
    """Cached annotations of one split's images, read only.

    A shard is mapped on first use in each process: only what is used is read, and a worker, forked or spawned, gets
    paths rather than data. Images are drawn at random, so the system is told which ones come: left alone it would wait
    for one after the other, and read megabytes ahead of each. That takes as long as copying what is in memory, so it is
    left out while nothing is read from a disk. Shards that no image is asked of need not be here.

    Args:
        directory: the cache folder.
        split: such as ``train``.
        fingerprint: ``encoder.fingerprint()`` of the encoder that the cache stands in for.

    Attributes:
        shape: (N, L, D).
        grid_size: (rows, cols).

    Raises:
        InputError: the cache is missing or was made by another encoder, with other weights or another preprocessing;
            says which.
    """

    def __init__(self, directory: str | Path, split: str, fingerprint: dict[str, Any]) -> None:
        manifest = Manifest.read(Path(directory), split)
        if manifest is None:
            missing = Path(directory) / f"{split}.json"
            images = split.removesuffix("_flipped")
            raise InputError(
                f"{missing}: no features; run scripts/extract_features.py with --splits {images}, or give "
                "--data.features null to compute them from the images"
            )
        refuse_other_encoder(manifest.path, manifest.fingerprint, fingerprint)
        rows, cols = manifest.fingerprint["grid_size"]
        self.grid_size: tuple[int, int] = (rows, cols)
        self.shape: tuple[int, int, int] = manifest.shape
        self._manifest = manifest
        self._shards: dict[int, _Shard] = {}
        self._from_memory = 0  # batches in a row for which no disk was read

    def __len__(self) -> int:
        return self.shape[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": {}}  # a spawned worker maps the files itself

    def check(self, rows: Tensor) -> None:
        """Check that the shards of these rows are here and of the right size, before work starts.

        Raises:
            InputError: one is not.
        """
        shards = np.unique(np.asarray(rows) // self._manifest.shard_images).tolist()
        missing = [shard for shard in shards if not self._manifest.is_finished(shard)]
        if missing:
            raise InputError(
                f"{self._manifest.array(missing[0])}: not there or not complete, as {len(missing)} of {len(shards)} "
                "files that are needed here; finish them with scripts/extract_features.py"
            )

    def shares(self, rows: Tensor, shares: int) -> Tensor:
        """Return (n,) int64, which of ``shares`` equal shares of the shards each row lies in."""
        return torch.from_numpy(share_of(np.asarray(rows) // self._manifest.shard_images, shares))

    def gather(self, rows: Sequence[int] | Tensor, *, pinned: bool = False) -> Tensor:
        """Return the annotations (B, L, D) half of some images: one copy, made without the interpreter lock.

        Args:
            rows: (B,), each in 0 .. N - 1.
            pinned: into page-locked memory, from which a GPU takes it while it computes. In a worker process the copy
                goes straight into shared memory instead.
        """
        index = np.asarray(rows, dtype=np.int64)
        if len(index) and not (index.min() >= 0 and index.max() < len(self)):
            raise IndexError(f"rows must be in 0 .. {len(self) - 1}, got {index.min()} .. {index.max()}")
        read_before = _disk_reads()
        shards, places = np.divmod(index, self._manifest.shard_images)
        # Opens the shards, which refuse a shape that they have not, before memory is taken for it.
        opened = {number: self._shard(number) for number in np.unique(shards).tolist()}
        if self._from_memory < _TRUSTED:
            for run in _runs(shards, places):
                self._announce(run)
        out = self.empty(len(index), pinned=pinned)
        into = out.numpy()
        for number, (numbers, scale) in opened.items():
            if scale is None and len(opened) == 1:
                np.take(numbers, places, axis=0, out=into, mode="clip")  # "raise" would copy twice
                continue
            for row in np.flatnonzero(shards == number).tolist():
                if scale is None:
                    into[row] = numbers[places[row]]
                else:
                    decode(numbers[places[row], None], scale, out[row, None])
        self._from_memory = self._from_memory + 1 if _disk_reads() == read_before is not None else 0
        return out

    def _announce(self, run: _Run) -> None:
        """Let the system read a run, all of a batch's at once, if it is not in memory."""
        if not hasattr(mmap, "MADV_WILLNEED"):
            return
        file: Any = self._shard(run.shard).numbers.base  # the memmap
        first = file.offset + run.first * self._manifest.row_bytes
        page = first - first % mmap.PAGESIZE
        _will_need(file._mmap, page, first + run.images * self._manifest.row_bytes - page)

    def empty(self, rows: int, *, pinned: bool = False) -> Tensor:
        """Return (rows, L, D) half with any content, in the memory that ``gather`` describes."""
        shape = (rows, *self.shape[1:])
        if get_worker_info() is None:
            if pinned:
                return torch.empty(shape, dtype=torch.float16, pin_memory=True)
            return torch.from_numpy(np.empty(shape, np.float16))  # in huge pages, unlike PyTorch's memory
        storage = torch.UntypedStorage._new_shared(2 * int(np.prod(shape)), device="cpu")
        return torch.empty(0, dtype=torch.float16).set_(storage, 0, shape)  # type: ignore[call-overload]

    def _shard(self, number: int) -> _Shard:
        if number not in self._shards:
            self._shards[number] = self._open(number)  # threads may both do this, with the same result
        return self._shards[number]

    def _open(self, number: int) -> _Shard:
        manifest, path = self._manifest, self._manifest.array(number)
        record = manifest.read_record(number)
        try:
            array = np.load(path, mmap_mode="r")
        except Exception as error:  # what NumPy raises on a damaged header is up to where the damage is
            raise InputError(f"{path}: cannot be read ({error}); delete it and extract again") from error
        shape = (len(manifest.rows(number)), *self.shape[1:])
        if array.shape != shape or array.dtype != DTYPES[manifest.dtype]:
            raise InputError(
                f"{path}: holds {array.dtype} {array.shape}, its header says {manifest.dtype} {shape}; "
                "delete it and extract again"
            )
        if hasattr(mmap, "MADV_RANDOM"):
            array._mmap.madvise(mmap.MADV_RANDOM)  # read nothing ahead
        return _Shard(np.asarray(array), record.scale)

    def find(self, paths: Iterable[str]) -> Tensor:
        """Return the rows (n,) int64 of the images at ``paths``, named as the record index names them.

        Raises:
            InputError: an image is not in the cache.
        """
        file = self._manifest.images
        images = read_cache(file)
        if not isinstance(images, list) or not all(isinstance(path, str) for path in images):
            raise InputError(f"{file}: not a list of images; delete the folder and extract again")
        row_of = {path: row for row, path in enumerate(images) if row < len(self)}
        try:
            return torch.tensor([row_of[path] for path in paths], dtype=torch.int64)
        except KeyError as error:
            raise InputError(
                f"{file}: has no features of image {error.args[0]}; it was made from other data, extract again"
            ) from error


def _runs(shards: NDArray[np.int64], places: NDArray[np.int64]) -> Iterator[_Run]:
    """Yield the runs of images that follow each other, each given as its shard and its place in it."""
    follows = (np.diff(places) == 1) & (np.diff(shards) == 0)
    starts = np.flatnonzero(np.r_[True, ~follows][: len(shards)]).tolist()
    for start, stop in itertools.pairwise([*starts, len(shards)]):
        yield _Run(int(shards[start]), int(places[start]), stop - start)


def _disk_reads() -> int | None:
    """Return a number that grows when this thread reads from a disk, or waits for one; None where nobody counts."""
    if resource is None or not hasattr(resource, "RUSAGE_THREAD"):
        return None
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_majflt + usage.ru_inblock


def _will_need(mapped: mmap.mmap, start: int, size: int) -> None:
    mapped.madvise(mmap.MADV_WILLNEED, start, size)
