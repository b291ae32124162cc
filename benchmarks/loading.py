"""The loader of cached features alone, and the fraction of training that waits for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.models import FeatureSource, natural_lengths
from benchmarks.report import Report, Row
from benchmarks.timing import Setup, interleave, wait_for
from benchmarks.training import PRECISIONS, cases, our_step
from captioning.data.batch import CaptionBatch
from captioning.data.features import create, note
from captioning.data.records import CaptionIndex, CaptionSource, ImageEntry
from captioning.training.datamodule import CaptionDataModule
from captioning.vocabulary import SPECIALS


class RandomCaptions(CaptionSource):
    """Images with a random caption each, of Flickr8k's lengths.

    Args:
        folder: Folder of the images, which need not exist: their features are cached.
        paths: Names of the images.
        vocabulary: V, special tokens included.
    """

    def __init__(self, folder: Path, paths: list[str], vocabulary: int) -> None:
        self.folder, self.paths, self.words = folder, paths, vocabulary - len(SPECIALS)

    def prepare(self) -> None:
        """Nothing to prepare."""

    def index(self, split: str) -> CaptionIndex:
        draw = np.random.default_rng(0)
        lengths = natural_lengths(len(self.paths))
        entries = (
            ImageEntry(number, path, [" ".join(f"w{word}" for word in draw.integers(self.words, size=length - 1))])
            for number, (path, length) in enumerate(zip(self.paths, lengths, strict=True))
        )
        return CaptionIndex.build(self.folder, entries)


def data_module(source: CaptionSource, encoder: Any, **options: Any) -> CaptionDataModule:
    """Return a data module that is ready to make training batches for an encoder."""
    data = CaptionDataModule(source, **options)
    data.encoder = encoder
    data.setup("fit")
    return data


def cached_features(
    folder: Path, encoder: FeatureSource, *, images: int, batch_size: int, vocabulary: int
) -> CaptionDataModule:
    """Return a data module of random features in a cache of one file, as ``captioning extract`` writes it."""
    paths, shape = [f"{n}.jpg" for n in range(images)], (math.prod(encoder.grid_size), encoder.annotation_dim)
    rows, _ = create(folder, "train", encoder.fingerprint(), paths, shape)
    for first in range(0, images, 50):
        rows[first : first + 50] = torch.rand(*rows[first : first + 50].shape)
    note(folder, "train", images)
    return data_module(RandomCaptions(folder, paths, vocabulary), encoder, batch_size=batch_size, features=str(folder))


def endless(data: CaptionDataModule, device: torch.device) -> Iterator[CaptionBatch]:
    """Yield training batches on the device, epoch after epoch."""
    loader = data.train_dataloader()
    while True:
        for batch in loader:
            yield batch.to(device, non_blocking=True)


def read_on_demand(data: CaptionDataModule, device: torch.device) -> Iterator[CaptionBatch]:
    """Yield training batches on the device, each read by the calling thread when it is asked for."""
    loader = data.train_dataloader()
    while True:
        for numbers in loader.sampler:
            yield loader.dataset[numbers].to(device)  # type: ignore[index] # the sampler yields lists


def waiting_fraction(
    batches: Iterator[CaptionBatch], step: Callable[[CaptionBatch], None], *, steps: int, device: torch.device
) -> float:
    """Return the fraction of the time of training steps, 0 to 1, that is spent waiting for the next batch."""
    step(next(batches))
    waited = 0.0
    start = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        step(batch)
        wait_for(device)
    return waited / (time.perf_counter() - start)


def measure(setup: Setup) -> Report:
    """Time the loader of cached features, and the fraction of training that waits for it."""
    sizes = cases(setup.quick)["512"]
    B, L, D, V = sizes.images, sizes.locations, sizes.annotation_dim, sizes.vocabulary
    images, encoder = B * (3 if setup.quick else 10), FeatureSource(L, D)
    data = cached_features(setup.folder / "features", encoder, images=images, batch_size=B, vocabulary=V)
    load = partial(next, read_on_demand(data, setup.device))
    for _ in range(2 * images // B):  # maps all of the file
        load()
    timings = interleave({"load_features": load}, setup)
    description = f"a batch of {B} images' cached features, {L} x {D} fp16, read in one thread"
    report = Report([Row("load_features", description, timings["load_features"], items=B)])
    for name, precision in PRECISIONS.items():
        step, steps = our_step(sizes, setup.device, precision=precision), 2 if setup.quick else 10
        fraction = waiting_fraction(endless(data, setup.device), step, steps=steps, device=setup.device)
        report.fractions[f"waiting_for_cached_features_{name}"] = fraction
    return report
