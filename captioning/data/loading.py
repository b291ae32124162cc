"""Batches made of records and of images or cached features, read ahead while the model computes."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from captioning.data.batch import CaptionBatch, pad_captions
from captioning.data.features import FeatureCache, FlippedFeatures
from captioning.data.records import CaptionIndex
from captioning.data.sampler import Numbers
from captioning.data.transforms import Preprocessing, TrainingTransform
from captioning.errors import InputError
from captioning.vocabulary import Vocabulary

Item = TypeVar("Item")
Result = TypeVar("Result")


class CaptionDataset(Dataset[CaptionBatch]):
    """Turns a list of numbers from a sampler into one batch.

    Args:
        index: Records of one split.
        vocabulary: Turns words into ids.
        preprocessing: Turns an image file into the encoder's input.
        transform: Preprocessing with random changes, for training; None for evaluation.
        seed: Seed of these changes. They depend on the seed, the batch's place in training and the image alone, not on
            the process or worker that loads the image, nor on where a run was resumed.
        features: Cached annotations, read instead of the images.
        flipped: Cached annotations of the mirrored images, for training; needs a sampler of ``Numbers``.
        by_image: Whether the sampler's numbers are images, each with all its captions, instead of single captions.
        pinned: Whether features are read into page-locked memory, for a GPU.
    """

    def __init__(
        self,
        index: CaptionIndex,
        vocabulary: Vocabulary,
        preprocessing: Preprocessing,
        *,
        transform: TrainingTransform | None = None,
        seed: int = 0,
        features: FeatureCache | None = None,
        flipped: FlippedFeatures | None = None,
        by_image: bool = False,
        pinned: bool = False,
    ) -> None:
        self.index = index
        self.vocabulary = vocabulary
        self.preprocessing = preprocessing
        self.transform = transform
        self.seed = seed
        self.features = features
        self.feature_rows = None if features is None else features.find(index.paths)
        self.flipped = flipped
        self.flipped_rows = None if flipped is None else flipped.cache.find(index.paths)
        self.by_image = by_image
        self.pinned = pinned

    def check_features(self, images: Tensor) -> None:
        """Check that the features of these images (rows of the index) are on this machine's disk.

        Raises:
            InputError: Some are missing.
        """
        if self.features is not None and self.feature_rows is not None:
            self.features.check(self.feature_rows[images])
        if self.flipped is not None and self.flipped_rows is not None:
            self.flipped.cache.check(self.flipped_rows[images])

    def __getitem__(self, numbers: list[int]) -> CaptionBatch:
        """Return the batch; in a worker process an InputError is returned, too, for ``CaptionLoader`` to raise."""
        try:
            return self._batch(numbers)
        except InputError as error:
            if get_worker_info() is None:
                raise
            return error  # type: ignore[return-value] # raised here, it would arrive with a traceback in its text

    def _batch(self, numbers: list[int]) -> CaptionBatch:
        index = self.index
        if self.by_image:
            rows = torch.tensor(numbers, dtype=torch.int64)
            first, last = index.first_caption[rows], index.first_caption[rows + 1]
            caption_numbers = [n for a, b in zip(first.tolist(), last.tolist(), strict=True) for n in range(a, b)]
            image_index = torch.repeat_interleave(torch.arange(len(rows)), last - first)
        else:
            # Captions of one image become neighbours; image_index is 0, 1, 2, .. unless an image has several.
            owners = index.caption_image[torch.tensor(numbers)].to(torch.int64)
            owners, order = owners.sort(stable=True)
            caption_numbers = [numbers[i] for i in order.tolist()]
            rows, image_index = owners.unique_consecutive(return_inverse=True)
        captions, lengths = pad_captions(
            [self.vocabulary.encode(index.captions[number].split()) for number in caption_numbers]
        )
        place = numbers.place if isinstance(numbers, Numbers) else (0, 0)
        images = annotations = None
        if self.features is None:
            images = torch.stack([self._image(row, place) for row in rows.tolist()])
        else:
            annotations = self._annotations(rows, epoch=place[0])
        return CaptionBatch(captions, lengths, image_index, index.image_ids[rows], rows, images, annotations)

    def _annotations(self, rows: Tensor, epoch: int) -> Tensor:
        """Return the cached annotations (B, L, D) of images (B,), mirrored as the epoch has it."""
        assert self.features is not None and self.feature_rows is not None
        if self.flipped is None or self.flipped_rows is None:
            return self.features.gather(self.feature_rows[rows], pinned=self.pinned)
        mirrored = self.flipped.chosen(epoch)[rows]
        annotations = self.features.empty(len(rows), pinned=self.pinned)
        annotations[~mirrored] = self.features.gather(self.feature_rows[rows[~mirrored]])
        annotations[mirrored] = self.flipped.cache.gather(self.flipped_rows[rows[mirrored]])
        return annotations

    def _image(self, row: int, place: tuple[int, int]) -> Tensor:
        """Return the input (3, height, width) of an image for the batch at ``place``."""
        image = self.index.image(row, self.preprocessing)
        if self.transform is None:
            return self.preprocessing(image)
        stream = np.random.SeedSequence((self.seed, *place, row)).generate_state(1, np.uint64)
        return self.transform(image, torch.Generator().manual_seed(int(stream[0])))


class CaptionLoader(DataLoader[CaptionBatch]):
    """A loader of whole batches. Cached features are read ahead in threads of this process, images in workers.

    Reading features is copying: threads do it while the model computes, and passing features between processes would
    cost more. A GPU needs several threads, because one thread copies a batch.
    """

    def __iter__(self) -> Iterator[CaptionBatch]:  # type: ignore[override]
        dataset = self.dataset
        assert isinstance(dataset, CaptionDataset)
        if self.num_workers or dataset.features is None:
            return map(_raise_error, super().__iter__())
        threads = min(4, processors()) if self.pin_memory else 1
        return read_ahead(self._read, self.sampler, threads=threads, depth=threads + 1)

    def _read(self, numbers: list[int]) -> CaptionBatch:
        batch = self.dataset[numbers]  # type: ignore[index] # the sampler yields lists
        return batch.pin_memory() if self.pin_memory else batch


def _raise_error(batch: CaptionBatch | InputError) -> CaptionBatch:
    if isinstance(batch, InputError):
        raise batch
    return batch


def obey_the_main_process(worker: int) -> None:
    """Make a data-loading process ignore the signals that every process of a run gets.

    A terminal sends Ctrl-C to all of them, and SIGHUP as it closes; a scheduler, ``timeout`` or systemd sends SIGTERM.
    The main process finishes its step, for which it may need another batch, and saves; then it ends its workers itself.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGHUP"):  # not on Windows
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_the_main_process, daemon=True).start()


def _end_with_the_main_process() -> None:
    main = os.getppid()
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main:
        pass
    os._exit(0)


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
