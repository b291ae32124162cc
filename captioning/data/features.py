"""A frozen encoder's annotations, computed once: a memory-mapped fp16 file per split.

A cache folder holds, for each split:

    <split>.npy           (N, L, D) float16, an ordinary NumPy file; ``<split>.npy.part`` until it is complete
    <split>.json          header: the encoder's fingerprint, the shape, how many images are done
    <split>.images.json   the images' paths, in row order

Features are computed with the *evaluation* preprocessing, so training from a cache always sees the same view of an
image: no random crop. ``<split>_flipped`` has the same views mirrored, where they were asked for. Values differ from
the encoder's by fp16 rounding (a relative 2**-11) and nothing else.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import shutil
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from captioning.errors import InputError, one_line
from captioning.files import complete, part_of, write_json

_FORMAT = 1
_HEADER_BYTES = 128  # NumPy pads the header of an array with so short a description to this
_SECONDS_BETWEEN_HEADERS = 2.0  # an fsync per batch would cost more than redoing two seconds after a power cut


class FeatureCache:
    """Cached annotations of one split's images, read only.

    The file is mapped on first use in each process: only what is used is read, and a worker, forked or spawned, gets
    the path rather than the data. Images are drawn at random, so the system is told which ones come: left alone it
    would wait for one after the other, and read megabytes ahead of each.

    Args:
        directory: the cache folder.
        split: such as ``train``.
        fingerprint: ``encoder.fingerprint()`` of the encoder that the cache stands in for.

    Attributes:
        shape: (N, L, D).
        grid_size: (rows, cols).

    Raises:
        InputError: the cache is missing or incomplete, or was made by another encoder, with other weights or another
            preprocessing; says which.
    """

    def __init__(self, directory: str | Path, split: str, fingerprint: dict[str, Any]) -> None:
        self._file = Path(directory) / f"{split}.npy"
        header = _read_header(Path(directory), split)
        if header is None:
            raise InputError(f"{_header(Path(directory), split)}: no features; run scripts/extract_features.py first")
        _refuse_other_encoder(_header(Path(directory), split), header["fingerprint"], fingerprint)
        n, locations, dim = header["shape"]
        if header["done"] < n or not self._file.exists():
            raise InputError(
                f"{self._file}: {header['done']} of {n} images are done; finish it with scripts/extract_features.py"
            )
        rows, cols = header["fingerprint"]["grid_size"]
        self.grid_size: tuple[int, int] = (rows, cols)
        self.shape: tuple[int, int, int] = (n, locations, dim)
        self._images = _images(Path(directory), split)
        self._mapped: NDArray[np.float16] | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None}  # a spawned worker maps the file itself

    def rows(self, row: int) -> Tensor:
        """Return the annotations (L, D) half of one image, without a copy. Writing into it ends the process."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(self._array)[row]

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
        self._announce(index)  # opens the file, which refuses a shape that it has not, before memory is taken for it
        out = self.empty(len(index), pinned=pinned)
        # In one thread, so that reading ahead does not take cores from training; "clip" writes without a buffer.
        np.take(self._array, index, axis=0, out=out.numpy(), mode="clip")
        return out

    def _announce(self, index: NDArray[np.int64]) -> None:
        """Let the system read these rows, all of them at once, if they are not in memory."""
        if not len(index) or not hasattr(mmap, "MADV_WILLNEED"):
            return
        file: Any = self._array.base  # the memmap
        size, mapped, begin = 2 * math.prod(self.shape[1:]), file._mmap, file.offset
        breaks = (np.flatnonzero(np.diff(index) != 1) + 1).tolist()
        for start, stop in itertools.pairwise([0, *breaks, len(index)]):  # neighbours as one
            first = begin + int(index[start]) * size
            page = first - first % mmap.PAGESIZE
            _will_need(mapped, page, first + (stop - start) * size - page)

    def empty(self, rows: int, *, pinned: bool = False) -> Tensor:
        """Return (rows, L, D) half with any content, in the memory that ``gather`` describes."""
        shape = (rows, *self.shape[1:])
        if get_worker_info() is None:
            return torch.empty(shape, dtype=torch.float16, pin_memory=pinned)
        storage = torch.UntypedStorage._new_shared(2 * math.prod(shape), device="cpu")
        return torch.empty(0, dtype=torch.float16).set_(storage, 0, shape)  # type: ignore[call-overload]

    @property
    def _array(self) -> NDArray[np.float16]:
        """(N, L, D), backed by the file."""
        if self._mapped is None:
            try:
                array = np.load(self._file, mmap_mode="r")
            except Exception as error:  # what NumPy raises on a damaged header is up to where the damage is
                raise InputError(f"{self._file}: cannot be read ({error}); delete it and extract again") from error
            if array.shape != self.shape or array.dtype != np.float16:
                raise InputError(
                    f"{self._file}: holds {array.dtype} {array.shape}, its header says float16 {self.shape}; "
                    "delete it and extract again"
                )
            if hasattr(mmap, "MADV_RANDOM"):
                array._mmap.madvise(mmap.MADV_RANDOM)  # read nothing ahead
            self._mapped = np.asarray(array)
        return self._mapped

    def find(self, paths: Iterable[str]) -> Tensor:
        """Return the rows (n,) int64 of the images at ``paths``, named as the record index names them.

        Raises:
            InputError: an image is not in the cache.
        """
        images = _read_json(self._images)
        if not isinstance(images, list) or not all(isinstance(path, str) for path in images):
            raise InputError(f"{self._images}: not a list of images; delete the folder and extract again")
        row_of = {path: row for row, path in enumerate(images) if row < len(self)}
        try:
            return torch.tensor([row_of[path] for path in paths], dtype=torch.int64)
        except KeyError as error:
            raise InputError(
                f"{self._file}: has no features of image {error.args[0]}; it was made from other data, extract again"
            ) from error


def flipped_split(split: str) -> str:
    """Return the name that the features of a split's mirrored images are kept under."""
    return f"{split}_flipped"


def flipped_fingerprint(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Return what the features of mirrored images were made with, so that none are taken for the others."""
    return {**fingerprint, "flipped": True}


class FlippedFeatures:
    """The mirrored side of a split, and which images of an epoch are seen from there.

    An image has one side for all its captions of an epoch, as a function of seed, epoch and image alone: a resumed run
    goes on with the same sides, whichever process or thread reads them.

    Args:
        cache: of the mirrored images.
        probability: that an image is mirrored in an epoch.
        seed: of the choice.
        images: N of the split, in the order of its ``CaptionIndex``.
    """

    def __init__(self, cache: FeatureCache, *, probability: float, seed: int, images: int) -> None:
        if not 0 <= probability <= 1:
            raise InputError(f"flip must be a probability, got {probability}")
        self.cache = cache
        self.probability = probability
        self.seed = seed
        self.images = images
        self._chosen: tuple[int, Tensor] | None = None

    def chosen(self, epoch: int) -> Tensor:
        """Return (N,) bool, True for images that are mirrored in the epoch."""
        known = self._chosen  # read once: threads share this object
        if known is None or known[0] != epoch:
            drawn = np.random.default_rng((self.seed, epoch, 1)).random(self.images)  # the batches draw without the 1
            known = self._chosen = (epoch, torch.from_numpy(drawn < self.probability))
        return known[1]


class FeatureWriter:
    """Fills the cache of one split in row order; a later writer resumes where this one stopped.

    A context manager: leaving it, also by Ctrl-C, records the progress; the last row completes the cache.

    Args:
        directory: the cache folder, created if missing.
        split: such as ``train``.
        paths: the images' paths, in row order.
        fingerprint: ``encoder.fingerprint()``.
        shape: (L, D) of one image.

    Attributes:
        done: images already in the file; write from this row on.

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
    ) -> None:
        self.directory, self.split = Path(directory), split
        self.shape = (len(paths), *shape)
        self._row_bytes = 2 * math.prod(shape)
        self._fingerprint = fingerprint
        self._paths = list(paths)
        self._file = self.directory / f"{split}.npy"
        self._part = part_of(self._file)
        self.done = self._resume()
        if self.done < len(paths):
            self._check_space((len(paths) - self.done) * self._row_bytes)
        self._saved = time.monotonic()

    def __enter__(self) -> FeatureWriter:
        if not self._file.exists():
            self._open_part()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._file.exists():
            self._save_progress()
            self._handle.close()
            if self.done == self.shape[0]:
                complete(self._file)

    def write(self, annotations: Tensor) -> None:
        """Append the annotations (B, L, D) of the next B images.

        Raises:
            InputError: a value does not fit into fp16 (beyond 65504, or not a number).
        """
        half = annotations.half().cpu()
        if half.shape[1:] != self.shape[1:] or self.done + len(half) > self.shape[0]:
            raise ValueError(f"annotations must be (B, {self.shape[1]}, {self.shape[2]}), got {tuple(half.shape)}")
        if not half.isfinite().all():
            raise InputError(
                f"the encoder gives values beyond fp16's 65504 in images {self.done} to {self.done + len(half) - 1} "
                f"of {self.split}; train from the images instead"
            )
        self._handle.write(half.contiguous().numpy().data)
        self.done += len(half)
        if time.monotonic() - self._saved > _SECONDS_BETWEEN_HEADERS:
            self._save_progress()

    def _resume(self) -> int:
        header = _read_header(self.directory, self.split)
        if header is None:
            return 0
        _refuse_other_encoder(_header(self.directory, self.split), header["fingerprint"], self._fingerprint)
        if header["shape"] != list(self.shape) or _read_json(_images(self.directory, self.split)) != self._paths:
            raise InputError(
                f"{_header(self.directory, self.split)}: made from other images; give another --output or delete the "
                "folder"
            )
        if self._file.exists():
            return self.shape[0]
        if not self._part.exists():
            return 0
        # The header may count rows that a file truncated afterwards no longer has.
        return min(int(header["done"]), (self._part.stat().st_size - _HEADER_BYTES) // self._row_bytes)

    def _check_space(self, missing: int) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.directory).free
        if free < missing:
            raise InputError(
                f"--output {self.directory}: {missing / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free; "
                "free some, give another folder, or choose an encoder with fewer or smaller annotations"
            )

    def _open_part(self) -> None:
        """Open the partial file at the first row that is missing."""
        if self.done <= 0:
            self.done = 0
            write_json(_images(self.directory, self.split), self._paths, indent=None)
            with open(self._part, "wb") as file:
                np.lib.format.write_array_header_1_0(
                    file, {"descr": "<f2", "fortran_order": False, "shape": self.shape}
                )
        self._handle = open(self._part, "r+b")  # noqa: SIM115 - __exit__ closes it
        self._handle.seek(_HEADER_BYTES + self.done * self._row_bytes)
        self._handle.truncate()
        self._save_progress()

    def _save_progress(self) -> None:
        """Write the data to disk first, then the header that counts it."""
        self._handle.flush()
        os.fsync(self._handle.fileno())
        header = {"format": _FORMAT, "fingerprint": self._fingerprint, "shape": list(self.shape), "done": self.done}
        write_json(_header(self.directory, self.split), header)
        self._saved = time.monotonic()


def _will_need(mapped: mmap.mmap, start: int, size: int) -> None:
    mapped.madvise(mmap.MADV_WILLNEED, start, size)


def features_size(shape: tuple[int, int, int]) -> int:
    """Bytes on disk of the fp16 features (N, L, D)."""
    return _HEADER_BYTES + 2 * math.prod(shape)


def _refuse_other_encoder(file: Path, made_with: dict[str, Any], expected: dict[str, Any]) -> None:
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


def _header(directory: Path, split: str) -> Path:
    return directory / f"{split}.json"


def _images(directory: Path, split: str) -> Path:
    return directory / f"{split}.images.json"


def _read_header(directory: Path, split: str) -> dict[str, Any] | None:
    path = _header(directory, split)
    if not path.exists():
        return None
    header = _read_json(path)
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise InputError(f"{path}: not a feature cache of format {_FORMAT}; delete it and extract again")
    fingerprint, shape, done = (header.get(name) for name in ("fingerprint", "shape", "done"))
    sizes = [*(shape if isinstance(shape, list) else ()), done]
    if len(sizes) != 4 or not all(type(size) is int and 0 <= size < 2**40 for size in sizes):
        raise InputError(f"{path}: its shape or count of images is damaged; delete the folder and extract again")
    if not isinstance(fingerprint, dict) or not isinstance(fingerprint.get("grid_size"), list):
        raise InputError(f"{path}: names no encoder; delete the folder and extract again")
    return header


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({one_line(error)}); delete the folder and extract again") from error
