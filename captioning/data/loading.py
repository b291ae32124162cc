"""Batches made of records and of images or cached features."""

from __future__ import annotations

import dataclasses
import multiprocessing
import operator
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from captioning.data.batch import CaptionBatch, pad_captions
from captioning.data.features import Features
from captioning.data.records import CaptionIndex
from captioning.data.regions import LARGEST_REGION, Region, RegionsInView
from captioning.data.transforms import Preprocessing, TrainingTransform, View
from captioning.errors import InputError, warn_once
from captioning.vocabulary import Vocabulary


def _obey_the_main_process(worker: int) -> None:
    """Ignore the signals that every process of a run gets from a terminal (Ctrl-C) or a scheduler (SIGTERM).

    The main process finishes its step, for which it may need another batch, and saves; then it ends its workers itself.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # Linux
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
        threading.Thread(target=_end_with_the_main_process, daemon=True).start()


def _end_with_the_main_process() -> None:
    parent = os.getppid()
    while os.getppid() == parent:  # another one's, where it was killed while this process waits for a disk
        sent = signal.sigtimedwait({signal.SIGTERM}, 5)
        if sent is not None and sent.si_pid == parent:
            break
    os._exit(0)


class BatchLoader(DataLoader[Any]):
    """A ``DataLoader`` that others can ask whether this process waits for a batch, and whose waits end."""

    waits_since: ClassVar[float | None] = None  # time.monotonic() at the beginning of the wait in progress
    workers: tuple[Any, ...] = ()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        others = multiprocessing.active_children()
        try:
            if self.num_workers:
                multiprocessing.Lock()  # as the queues of workers have
            batches = super().__iter__()
        except OSError as error:
            what = f"processes that load images cannot start ({error.strerror}), perhaps for lack of a /dev/shm"
            raise InputError(f"{what}; to do without: --data.num_workers 0") from error
        self.workers += tuple(child for child in multiprocessing.active_children() if child not in others)
        while (batch := self._next(batches)) is not None:
            yield batch

    def _next(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, None at the end."""
        BatchLoader.waits_since = time.monotonic()
        try:
            try:
                return next(batches, None)
            except RuntimeError as error:
                if "timed out" not in str(error):
                    raise
                warn_once(f"no batch has come for {self.timeout} seconds; does a disk or the network hang?")
                return next(batches, None)  # the time may be that of a process that was stopped
            except (ConnectionError, EOFError) as error:  # in what a worker had sent before it died
                raise RuntimeError(f"DataLoader worker (pid unknown) is gone: {error}") from error
        except BaseException:
            for worker in self.workers:  # PyTorch would wait for each
                if worker.is_alive():
                    worker.terminate()
                    os.kill(worker.pid, getattr(signal, "SIGCONT", signal.SIGTERM))
            raise
        finally:
            BatchLoader.waits_since = None


def batch_loader(
    dataset: Dataset[Any], batches: Iterable[list[int]], num_workers: int = 0, **options: Any
) -> BatchLoader:
    """Return a loader of whole batches, which have these numbers."""
    if num_workers:
        # Where a worker itself puts its batch into shared memory, its errors are raised in the main process. PyTorch's
        # default is a thread of the worker's, whose errors nobody hears of.
        options = {"timeout": 300, "collate_fn": operator.methodcaller("share_memory_")} | options
    init = _obey_the_main_process
    return BatchLoader(dataset, None, sampler=batches, num_workers=num_workers, worker_init_fn=init, **options)


class CaptionDataset(Dataset[CaptionBatch]):
    """Turns a list of numbers from a sampler into one batch.

    Args:
        transform: Preprocessing with random changes, for training; None for evaluation.
        seed: Seed of these changes. They depend on the seed, the batch's place in training and the image alone, not on
            the process or worker that loads the image, nor on where a run was resumed.
        features: Cached annotations of the index's images, read instead of the images.
        flipped: Cached annotations of the mirrored images, for training.
        flip: Probability that an epoch takes an image's annotations from ``flipped``, for all its captions.
        by_image: Whether the sampler's numbers are images, each with all its captions, instead of single captions.
        regions: Regions of the captions' phrases, for training that teaches attention by them.
    """

    def __init__(
        self,
        index: CaptionIndex,
        vocabulary: Vocabulary,
        preprocessing: Preprocessing,
        *,
        transform: TrainingTransform | None = None,
        seed: int = 0,
        features: Features | None = None,
        flipped: Features | None = None,
        flip: float = 0.0,
        by_image: bool = False,
        regions: RegionsInView | None = None,
    ) -> None:
        self.index, self.by_image = index, by_image
        self.preprocessing, self.transform, self.seed = preprocessing, transform, seed
        self.features, self.flipped, self.flip = features, flipped, flip
        self.regions = regions
        self._regions: dict[tuple[int, bool], list[list[Region]]] = {}
        # One array of word ids, which forked workers share.
        ids = [np.array(vocabulary.encode(caption.split()), dtype=np.int32) for caption in index.captions]
        self._words, self._first_word = np.concatenate([np.empty(0, np.int32), *ids]), np.cumsum([0, *map(len, ids)])

    def __getitem__(self, numbers: list[int]) -> CaptionBatch:
        index, place = self.index, getattr(numbers, "place", (0, 0))
        if self.by_image:
            rows = np.array(numbers, dtype=np.int64)
            captions = np.concatenate([np.arange(*index.first_caption[row : row + 2]) for row in numbers])
            image_index = np.repeat(np.arange(len(rows)), np.diff(index.first_caption)[rows])
        else:
            # Captions of one image become neighbours; image_index is 0, 1, 2, .. unless an image has several.
            captions = np.array(numbers)[np.argsort(index.caption_image[numbers], kind="stable")]
            rows, image_index = np.unique(index.caption_image[captions], return_inverse=True)
        ends = self._first_word
        ids, lengths = pad_captions([self._words[ends[n] : ends[n + 1]].tolist() for n in captions])
        images = annotations = None
        views: list[Callable[[tuple[int, int]], View]] = [self.preprocessing.geometry] * len(rows)
        if self.features is None:
            loaded = [self._image(row, place) for row in rows.tolist()]
            images, views = torch.stack([image for image, _ in loaded]), [view for _, view in loaded]
        else:
            annotations = self.features.gather(rows)
            if self.flipped is not None:
                # The sampler seeds its order with (seed, epoch); the 1 keeps the two streams apart.
                drawn = np.random.default_rng((self.seed, place[0], 1)).random(len(index))
                mirrored = drawn[rows] < self.flip
                annotations[torch.from_numpy(mirrored)] = self.flipped.gather(rows[mirrored])
                views = [self._mirrored if one else self.preprocessing.geometry for one in mirrored]
        of_captions, image_ids, image_rows = map(torch.from_numpy, (image_index, index.image_ids[rows], rows))
        batch = CaptionBatch(ids, lengths, of_captions, image_ids, image_rows, images, annotations)
        return batch if self.regions is None else self._with_regions(batch, captions, views)

    def _image(self, row: int, place: tuple[int, int]) -> tuple[Tensor, Callable[[tuple[int, int]], View]]:
        """Return the input (3, height, width) of an image for the batch at ``place``, and its view by size."""
        image = self.index.image(row, self.preprocessing)
        if self.transform is None:
            return self.preprocessing(image), self.preprocessing.geometry
        stream = np.random.SeedSequence((self.seed, *place, row)).generate_state(1, np.uint64)
        view = self.transform.draw(image.size, torch.Generator().manual_seed(int(stream[0])))
        return self.transform.input(image, view), lambda _: view

    def _mirrored(self, size: tuple[int, int]) -> View:
        return self.preprocessing.geometry(size)._replace(mirrored=True)

    def _with_regions(
        self, batch: CaptionBatch, captions: np.ndarray, views: Sequence[Callable[[tuple[int, int]], View]]
    ) -> CaptionBatch:
        """Return the batch with the regions of its captions' phrases, except those that are most of the view."""
        assert self.regions is not None
        in_view = [self._regions_of(row, view) for row, view in zip(batch.rows.tolist(), views, strict=True)]
        covered, steps = [], []
        for place, (caption, image) in enumerate(zip(captions.tolist(), batch.image_index.tolist(), strict=True)):
            for region in in_view[image][caption - self.index.first_caption[batch.rows[image]]]:
                if region.covered.mean() <= LARGEST_REGION:
                    steps += [(place, step) for step in range(region.start, region.end)]
                    covered += [region.covered.ravel()] * (region.end - region.start)
        if not steps:
            return batch
        regions = torch.from_numpy(np.array(covered, dtype=np.float32))
        return dataclasses.replace(batch, regions=regions, region_steps=torch.tensor(steps))

    def _regions_of(self, row: int, view: Callable[[tuple[int, int]], View]) -> list[list[Region]]:
        """Return the regions of an image's captions; those of cached features, whose views are two, are kept."""
        assert self.regions is not None
        if self.features is None:
            return self.regions.phrases_in(row, view)
        key = row, view == self._mirrored
        if key not in self._regions:
            self._regions[key] = self.regions.phrases_in(row, view)
        return self._regions[key]


def load_images(index: CaptionIndex, rows: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Return the images of rows (B,) as input (B, 3, height, width) of an encoder with this preprocessing."""
    return torch.stack([preprocessing(index.image(row, preprocessing)) for row in rows.tolist()])


def processors() -> int:
    """Return how many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
