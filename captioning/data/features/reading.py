"""Cached features as training reads them, and the mirrored side of a split."""

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

from captioning.data.features.checksums import damage_of
from captioning.data.features.layout import HEADER_BYTES, Manifest, refuse_other_encoder
from captioning.errors import InputError
from captioning.progress import Progress

_BATCHES_FROM_MEMORY = 8
"""After so many batches in a row without disk reads, the system gets no more advice until a batch needs the disk."""


class _Run(NamedTuple):
    """Neighbouring images of one shard."""

    shard: int
    first: int
    images: int


class FeatureCache:
    """Cached annotations of one split's images, read only.

    A shard is compared with its checksum and mapped on first use, and a worker, forked or spawned, gets paths instead
    of data. A worker does not check again what its parent has checked. Shards that no batch needs may be missing.

    Images are drawn at random, so the system is told which ones are needed next. Without that advice it waits for one
    image after the other and reads megabytes ahead of each. Giving advice takes as long as copying from memory, so it
    stops while no batch needs the disk.

    Args:
        directory: The cache folder.
        split: The split's name, such as ``train``.
        fingerprint: Fingerprint of the encoder that the cache stands in for (``view_fingerprint``).

    Attributes:
        shape: (N, L, D).
        grid_size: (height, width) of the encoder's grid.

    Raises:
        InputError: The cache is missing, or was made by another encoder, other weights or another preprocessing; the
            message says which.
    """

    def __init__(self, directory: str | Path, split: str, fingerprint: dict[str, Any]) -> None:
        manifest = Manifest.read(Path(directory), split)
        if manifest is None:
            missing = Path(directory) / f"{split}.json"
            images = split.removesuffix("_flipped")
            raise InputError(
                f"{missing}: no features; run captioning extract with --split {images}, or give "
                "--data.features null to compute them from the images"
            )
        refuse_other_encoder(manifest.path, manifest.fingerprint, fingerprint)
        height, width = manifest.fingerprint["grid_size"]
        self.grid_size: tuple[int, int] = (height, width)
        self.shape: tuple[int, int, int] = manifest.shape
        self._manifest = manifest
        self._shards: dict[int, NDArray[np.float16]] = {}
        self._checked: set[int] = set()  # shards that match their checksums
        self._from_memory = 0  # batches in a row that needed no disk

    def __len__(self) -> int:
        return self.shape[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": {}}  # a spawned worker maps the files itself

    def check(self, rows: Tensor) -> None:
        """Check, before work starts, that the shards of these rows exist and match their checksums.

        Raises:
            InputError: A shard is missing, incomplete or damaged.
        """
        shards = np.unique(np.asarray(rows) // self._manifest.shard_images).tolist()
        missing = [shard for shard in shards if not self._manifest.is_finished(shard)]
        if missing:
            raise InputError(
                f"{self._manifest.array(missing[0])}: missing or incomplete, like {len(missing)} of {len(shards)} "
                "files that are needed here; finish them with captioning extract"
            )
        with Progress(f"checking the features of {self._manifest.split}", len(shards), unit="shards") as progress:
            for done, shard in enumerate(shards, 1):
                self._shard(shard)
                progress.update(done)

    def gather(self, rows: Sequence[int] | Tensor, *, pinned: bool = False) -> Tensor:
        """Return annotations (B, L, D) half of some images: one copy, made without the interpreter lock.

        Args:
            rows: (B,) rows of the split, 0 .. N - 1.
            pinned: Copy into page-locked memory, from which a GPU reads while it computes. In a worker process the
                copy goes straight into shared memory instead.
        """
        index = np.asarray(rows, dtype=np.int64)
        if len(index) and not (index.min() >= 0 and index.max() < len(self)):
            raise IndexError(f"rows must be in 0 .. {len(self) - 1}, got {index.min()} .. {index.max()}")
        read_before = _disk_reads()
        numbers, places = np.divmod(index, self._manifest.shard_images)
        # A damaged manifest may claim any size: compare it with the shards before memory is taken.
        shards = {number: self._shard(number) for number in np.unique(numbers).tolist()}
        if self._from_memory < _BATCHES_FROM_MEMORY:
            for run in _runs(numbers, places):
                self._announce(run)
        annotations = self.empty(len(index), pinned=pinned)
        out = annotations.numpy()
        if len(shards) == 1:
            (shard,) = shards.values()
            np.take(shard, places, axis=0, out=out, mode="clip")  # mode "raise" would copy twice
        else:
            for row, (number, place) in enumerate(zip(numbers.tolist(), places.tolist(), strict=True)):
                out[row] = shards[number][place]
        self._from_memory = self._from_memory + 1 if _disk_reads() == read_before is not None else 0
        return annotations

    def _announce(self, run: _Run) -> None:
        """Tell the system that a run is needed next."""
        if not hasattr(mmap, "MADV_WILLNEED"):
            return
        file: Any = self._shard(run.shard).base  # the memmap
        first = file.offset + run.first * self._manifest.image_bytes
        page = first - first % mmap.PAGESIZE
        _will_need(file._mmap, page, first + run.images * self._manifest.image_bytes - page)

    def empty(self, rows: int, *, pinned: bool = False) -> Tensor:
        """Return an uninitialised tensor (rows, L, D) half in the memory that ``gather`` describes."""
        shape = (rows, *self.shape[1:])
        if get_worker_info() is None:
            if pinned:
                return torch.empty(shape, dtype=torch.float16, pin_memory=True)
            return torch.from_numpy(np.empty(shape, np.float16))  # in huge pages, unlike PyTorch's memory
        storage = torch.UntypedStorage._new_shared(2 * int(np.prod(shape)), device="cpu")
        return torch.empty(0, dtype=torch.float16).set_(storage, 0, shape)  # type: ignore[call-overload]

    def _shard(self, number: int) -> NDArray[np.float16]:
        if number not in self._shards:
            self._shards[number] = self._open(number)  # two threads may do this at once, with the same result
        return self._shards[number]

    def _open(self, number: int) -> NDArray[np.float16]:
        path = self._manifest.array(number)
        if number not in self._checked and (damage := damage_of(self._manifest, number)):
            raise InputError(f"{path}: {damage}; delete it and extract again")
        self._checked.add(number)
        try:
            shape = self._manifest.shard_shape(number)
            array: Any = np.memmap(path, dtype="<f2", mode="r", offset=HEADER_BYTES, shape=shape)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read ({error})") from error
        if hasattr(mmap, "MADV_RANDOM"):
            array._mmap.madvise(mmap.MADV_RANDOM)  # no reading ahead
        return np.asarray(array)

    def find(self, paths: Iterable[str]) -> Tensor:
        """Return the rows (n,) int64 of the images at ``paths``, named as in ``CaptionIndex.paths``.

        Raises:
            InputError: An image is not in the cache, or the list of its images is damaged.
        """
        row_of = {path: row for row, path in enumerate(self._manifest.image_paths())}
        try:
            return torch.tensor([row_of[path] for path in paths], dtype=torch.int64)
        except KeyError as error:
            raise InputError(
                f"{self._manifest.images}: has no features of image {error.args[0]}; it was made from other data, "
                "extract again"
            ) from error


class FlippedFeatures:
    """Cached features of mirrored images, and the choice of images that an epoch sees mirrored.

    All captions of an image see the same side within an epoch. The choice depends on seed, epoch and image alone, so a
    resumed run sees the same sides, whichever process or thread reads them.

    Args:
        cache: Features of the mirrored images.
        probability: Probability that an image is mirrored in an epoch.
        seed: Seed of the choice.
        images: N of the split, in the order of its ``CaptionIndex``.
    """

    def __init__(self, cache: FeatureCache, *, probability: float, seed: int, images: int) -> None:
        if not 0 <= probability <= 1:
            raise InputError(f"flip must be a probability, got {probability}")
        self.cache = cache
        self.probability = probability
        self.seed = seed
        self.images = images
        self._latest: tuple[int, Tensor] | None = None

    def chosen(self, epoch: int) -> Tensor:
        """Return (N,) bool, True for images that are mirrored in the epoch."""
        latest = self._latest  # read once: threads share this object
        if latest is None or latest[0] != epoch:
            # The sampler seeds its order with (seed, epoch); the 1 keeps the two streams apart.
            drawn = np.random.default_rng((self.seed, epoch, 1)).random(self.images)
            latest = self._latest = (epoch, torch.from_numpy(drawn < self.probability))
        return latest[1]


def _runs(numbers: NDArray[np.int64], places: NDArray[np.int64]) -> Iterator[_Run]:
    """Yield the runs of consecutive images, of which ``numbers`` gives the shard and ``places`` the place in it."""
    follows = (np.diff(places) == 1) & (np.diff(numbers) == 0)
    starts = np.flatnonzero(np.r_[True, ~follows][: len(numbers)]).tolist()
    for start, stop in itertools.pairwise([*starts, len(numbers)]):
        yield _Run(int(numbers[start]), int(places[start]), stop - start)


def _disk_reads() -> int | None:
    """Return a counter that grows when this thread reads from a disk or waits for one; None if nothing counts that."""
    if resource is None or not hasattr(resource, "RUSAGE_THREAD"):
        return None
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_majflt + usage.ru_inblock


def _will_need(mapped: mmap.mmap, start: int, size: int) -> None:
    mapped.madvise(mmap.MADV_WILLNEED, start, size)
