"""Batches made of records and of images or cached features."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, from_numpy
from torch.utils.data import DataLoader, Dataset

from captioning.data.batch import CaptionBatch, pad_captions
from captioning.data.features import Features, features_key
from captioning.data.records import CaptionIndex, CaptionSource
from captioning.data.regions import LARGEST_REGION, RegionsInView
from captioning.data.transforms import Augmentation, Preprocessing, ViewFunction
from captioning.errors import InputError, check_whole, one_line
from captioning.trace import map_fields
from captioning.vocabulary import Vocabulary

if TYPE_CHECKING:
    from captioning.encoders import Encoder


def _init_worker(worker: int) -> None:
    """Ignore the signals that every process of a run gets from a terminal (Ctrl-C) or a scheduler (SIGTERM).

    The main process needs batches until its step is finished. Then it saves, and ends its workers itself. On
    Linux, where SIGTERM is blocked, a thread ends the worker when the main process sends SIGTERM or is killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # Linux
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
        threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = os.getppid()
    while os.getppid() == parent:  # a process whose parent was killed gets another parent
        sent = signal.sigtimedwait({signal.SIGTERM}, 5)
        if sent is not None and sent.si_pid == parent:
            break
    os._exit(0)


class BatchLoader(DataLoader[Any]):
    """A ``DataLoader`` that reports a dead worker even if the worker died while it sent a batch."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        try:
            yield from super().__iter__()
        except (ConnectionError, EOFError) as error:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler would report the worker once more
            problem = f"a process that loads images died ({one_line(error)}), often for lack of memory"
            raise InputError(f"{problem}; lower num_workers") from error


def batch_loader(
    dataset: Dataset[Any], batches: Iterable[list[int]], num_workers: int = 0, **options: Any
) -> BatchLoader:
    """Return a loader that asks the data set for each list of indices in ``batches``."""
    if num_workers:
        # The worker puts its batch into shared memory itself, so that the main process raises its errors. In PyTorch's
        # default, a thread of the worker does so, and its errors are lost.
        options["collate_fn"] = functools.partial(map_fields, function=Tensor.share_memory_)
    options |= {"num_workers": num_workers, "worker_init_fn": _init_worker}
    return BatchLoader(dataset, None, sampler=batches, **options)


@dataclass(eq=False)
class CaptionDataset(Dataset[CaptionBatch]):
    """Turns a list of indices from a sampler, of captions or of images, into one batch.

    Args:
        seed: Seed of the augmentation. An image's augmentation is a function of seed, epoch, batch and image, so
            neither workers nor resuming change it.
        features, mirrored_features: Cached annotations, read instead of the images and of the mirrored images.
        by_image: Whether the sampler's indices are of images, each with all its captions, instead of single captions.
        regions: Regions of the captions' phrases, for training that teaches attention by them.
    """

    index: CaptionIndex
    vocabulary: Vocabulary
    preprocessing: Preprocessing
    _: KW_ONLY
    augmentation: Augmentation = Augmentation()  # noqa: RUF009 - frozen
    seed: int = 0
    features: Features | None = None
    mirrored_features: Features | None = None
    by_image: bool = False
    regions: RegionsInView | None = None

    def __getitem__(self, indices: list[int]) -> CaptionBatch:
        index = self.index
        preprocessing = self.preprocessing
        epoch_and_batch = getattr(indices, "epoch_and_batch", (0, 0))
        if self.by_image:
            rows = np.array(indices, dtype=np.int64)
            caption_numbers = np.concatenate([np.arange(*index.first_caption[row : row + 2]) for row in indices])
            image_index = np.repeat(np.arange(len(rows)), np.diff(index.first_caption)[rows])
        else:
            # Captions of one image become neighbors; image_index is 0, 1, 2, .. unless an image has several.
            caption_numbers = np.array(indices)[np.argsort(index.caption_image[indices], kind="stable")]
            rows, image_index = np.unique(index.caption_image[caption_numbers], return_inverse=True)
        captions, lengths = pad_captions([self.vocabulary.encode(index.captions[n].split()) for n in caption_numbers])
        images = annotations = None
        if self.features is None:
            pairs = [self._load_image(row, epoch_and_batch) for row in rows.tolist()]
            images = torch.stack([image for image, _ in pairs])
            view_functions = [function for _, function in pairs]
        else:
            annotations = self.features.gather(rows)
            is_mirrored = np.zeros(len(rows), dtype=bool)
            if self.mirrored_features is not None:
                # The sampler seeds its order with (seed, epoch); the 1 keeps the two streams apart.
                uniform = np.random.default_rng((self.seed, epoch_and_batch[0], 1)).random(len(index))
                is_mirrored = uniform[rows] < self.augmentation.flip
                annotations[from_numpy(is_mirrored)] = self.mirrored_features.gather(rows[is_mirrored])
            view_functions = [preprocessing.mirrored_view if m else preprocessing.evaluation_view for m in is_mirrored]
        image_ids, index_rows = from_numpy(index.image_ids[rows]), from_numpy(rows)
        batch = CaptionBatch(captions, lengths, from_numpy(image_index), image_ids, index_rows, images, annotations)
        return self._add_regions(batch, caption_numbers, view_functions)

    def _load_image(self, row: int, epoch_and_batch: tuple[int, int]) -> tuple[Tensor, ViewFunction]:
        """Return an image's input (3, height, width) for the batch at ``epoch_and_batch``, and its view."""
        image = self.index.image(row, self.preprocessing)
        if self.augmentation == Augmentation():
            return self.preprocessing(image), self.preprocessing.evaluation_view
        (seed,) = np.random.SeedSequence((self.seed, *epoch_and_batch, row)).generate_state(1, np.uint64)
        view = self.augmentation.random_view(self.preprocessing, image.size, torch.Generator().manual_seed(int(seed)))
        return self.preprocessing(image, view), lambda _: view

    def _add_regions(
        self, batch: CaptionBatch, caption_numbers: np.ndarray, view_functions: list[ViewFunction]
    ) -> CaptionBatch:
        """Return the batch with the regions of its captions' phrases, without regions that fill most of the view."""
        if self.regions is None:
            return batch
        images = zip(batch.index_rows.tolist(), view_functions, strict=True)  # with cached features, views recur
        regions_by_image = [self.regions.caption_regions(*image, cached=self.features is not None) for image in images]
        coverage, region_steps = [], []
        for position, (n, image) in enumerate(zip(caption_numbers.tolist(), batch.image_index.tolist(), strict=True)):
            for region in regions_by_image[image][n - self.index.first_caption[batch.index_rows[image]]]:
                if region.coverage.mean() <= LARGEST_REGION:
                    region_steps += [(position, step) for step in range(region.start, region.end)]
                    coverage += [region.coverage.ravel()] * (region.end - region.start)
        if not region_steps:
            return batch
        coverage_array = np.array(coverage, dtype=np.float32)
        return batch._replace(regions=from_numpy(coverage_array), region_steps=torch.tensor(region_steps))


class SplitData:
    """One split of a data set: its records, and on demand its regions and its batches for an encoder.

    Only the first ``limit_images`` images are used. ``features`` is a folder of annotations that replace the images.
    Raises InputError if the split is empty, or if image files are missing and there are no features.
    """

    def __init__(
        self, source: CaptionSource, split: str, *, limit_images: int | None = None, features: str | None = None
    ) -> None:
        self.source, self.split, self.features_folder = source, split, features
        self.index = source.index(split).take(limit_images)
        if features is None:
            self.index.check_images()
        self._regions: RegionsInView | None = None

    def regions(self, encoder: Encoder) -> RegionsInView:
        """Return the objects and phrases of the images on the encoder's cells; they are computed once."""
        self._regions = self._regions or RegionsInView(self.source, self.split, self.index, encoder)
        return self._regions

    def cached_features(self, encoder: Encoder, *, mirrored: bool = False) -> Features | None:
        """Return the annotations that are cached for the encoder; None if the split has no ``features``."""
        if self.features_folder is None:
            return None
        name, identity = features_key(self.split, encoder.frozen_identity(), mirrored=mirrored)
        return Features(self.features_folder, name, identity, self.index.paths)

    def evaluation_dataset(self, vocabulary: Vocabulary, encoder: Encoder) -> CaptionDataset:
        """Return the split as a data set of batches for an encoder: images, each with all its captions."""
        features = self.cached_features(encoder)
        return CaptionDataset(self.index, vocabulary, encoder.preprocessing, features=features, by_image=True)


def load_images(index: CaptionIndex, rows: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Return the images of rows (B,) as input (B, 3, height, width) of an encoder with this preprocessing."""
    return torch.stack([preprocessing(index.image(row, preprocessing)) for row in rows.tolist()])


def worker_count(num_workers: int | None, *, cached: bool) -> int:
    """Return ``num_workers``, by default one per processor and at most 8; for cached features 2 with a GPU, else 0."""
    if num_workers is not None:
        check_whole(0, 1024, num_workers=num_workers)
        return num_workers
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return (2 if torch.cuda.is_available() else 0) if cached else min(8, processors)
