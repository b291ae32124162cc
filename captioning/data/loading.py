"""Batches made of records and of images or cached features, read ahead while the model computes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from captioning.data.batch import CaptionBatch, pad_captions
from captioning.data.features import FeatureCache, FlippedFeatures
from captioning.data.records import CaptionIndex
from captioning.data.sampler import EpochBatch
from captioning.data.transforms import Preprocessing, TrainingTransform
from captioning.vocabulary import Vocabulary

Item = TypeVar("Item")
Result = TypeVar("Result")


class CaptionDataset(Dataset[CaptionBatch]):
    """Turns a list of numbers from a sampler into one batch.

    Args:
        index: the records of one split.
        vocabulary: for the ids.
        preprocessing: turns an image file into the encoder's input.
        transform: the same with random changes, for training; by default ``preprocessing``.
        features: cached annotations, read instead of the images.
        flipped: those of the mirrored images, for training; the sampler's lists then say their epoch (``EpochBatch``).
        by_image: the sampler's numbers are images, each with all its captions, instead of single captions.
        pinned: read features into page-locked memory, for a GPU.
    """

    def __init__(
        self,
        index: CaptionIndex,
        vocabulary: Vocabulary,
        preprocessing: Preprocessing,
        *,
        transform: TrainingTransform | None = None,
        features: FeatureCache | None = None,
        flipped: FlippedFeatures | None = None,
        by_image: bool = False,
        pinned: bool = False,
    ) -> None:
        self.index = index
        self.vocabulary = vocabulary
        self.preprocessing = preprocessing
        self.transform = transform or preprocessing
        self.features = features
        self.feature_rows = None if features is None else features.find(index.paths)
        self.flipped = flipped
        self.flipped_rows = None if flipped is None else flipped.cache.find(index.paths)
        self.by_image = by_image
        self.pinned = pinned

    def __getitem__(self, numbers: list[int]) -> CaptionBatch:
        index = self.index
        if self.by_image:
            rows = torch.tensor(numbers, dtype=torch.int64)
            first, last = index.first_caption[rows], index.first_caption[rows + 1]
            caption_numbers = [n for a, b in zip(first.tolist(), last.tolist(), strict=True) for n in range(a, b)]
            image_index = torch.repeat_interleave(torch.arange(len(rows)), last - first)
        else:
            # Captions of one image are adjacent; image_index is 0, 1, 2, .. unless an image has several.
            owners = index.caption_image[torch.tensor(numbers)].to(torch.int64)
            owners, order = owners.sort(stable=True)
            caption_numbers = [numbers[i] for i in order.tolist()]
            rows, image_index = owners.unique_consecutive(return_inverse=True)
        captions, lengths = pad_captions(
            [self.vocabulary.encode(index.captions[number].split()) for number in caption_numbers]
        )
        images = annotations = None
        if self.features is not None and self.feature_rows is not None:
            if self.flipped is None or self.flipped_rows is None:
                annotations = self.features.gather(self.feature_rows[rows], pinned=self.pinned)
            else:
                assert isinstance(numbers, EpochBatch)
                mirrored = self.flipped.chosen(numbers.epoch)[rows]
                annotations = self.features.empty(len(rows), pinned=self.pinned)
                annotations[~mirrored] = self.features.gather(self.feature_rows[rows[~mirrored]])
                annotations[mirrored] = self.flipped.cache.gather(self.flipped_rows[rows[mirrored]])
        else:
            images = torch.stack(
                [self.transform(self.preprocessing.load(index.image_path(row))) for row in rows.tolist()]
            )
        return CaptionBatch(captions, lengths, image_index, index.image_ids[rows], rows, images, annotations)


class CaptionLoader(DataLoader[CaptionBatch]):
    """A loader of whole batches. Cached features are read ahead in threads of this process, images in workers.

    Reading features is copying: threads do it while the model computes, and passing them between processes would cost
    more. A GPU is fed by several, because a batch is copied in one thread.
    """

    def __iter__(self) -> Iterator[CaptionBatch]:  # type: ignore[override]
        dataset = self.dataset
        assert isinstance(dataset, CaptionDataset)
        if self.num_workers or dataset.features is None:
            return super().__iter__()
        threads = min(4, processors()) if self.pin_memory else 1
        return read_ahead(self._read, self.sampler, threads=threads, depth=threads + 1)

    def _read(self, numbers: list[int]) -> CaptionBatch:
        batch = self.dataset[numbers]  # type: ignore[index] # the sampler yields lists
        return batch.pin_memory() if self.pin_memory else batch


def read_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], *, threads: int, depth: int
) -> Iterator[Result]:
    """Yield ``function(item)`` of every item in order; up to ``depth`` of them are in progress or ready.

    An error is raised when its item is due. Closing the iterator waits for calls in progress.
    """
    pending: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="read_ahead")
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
