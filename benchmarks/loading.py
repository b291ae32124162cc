"""Loaders alone, and how long training waits for them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.images import encoders, photograph_size, photographs
from benchmarks.models import FeatureSource, natural_lengths
from benchmarks.report import Report, Row
from benchmarks.timing import Timing, interleave, wait_for
from benchmarks.training import PRECISIONS, cases, our_step
from benchmarks.work import Probe
from captioning.data.batch import CaptionBatch
from captioning.data.features import FeatureCache, FeatureWriter
from captioning.data.records import CaptionIndex, CaptionSource, ImageEntry
from captioning.encoders import ConvEncoder
from captioning.training.datamodule import CaptionDataModule
from captioning.vocabulary import SPECIALS


class RandomCaptions(CaptionSource):
    """Images of one folder with a random caption each, of Flickr8k's lengths.

    Args:
        folder: where the images are, or would be.
        paths: of the images in it.
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


class CachedEncoder(FeatureSource):
    """Stands for a frozen encoder whose features are cached; nothing is ever encoded with it."""

    preprocessing = ConvEncoder((4,), (4,), image_size=16).preprocessing

    def fingerprint(self) -> dict[str, Any]:
        return {"encoder": "none", "grid_size": list(self.grid_size), "annotation_dim": self.annotation_dim}


def data_module(source: CaptionSource, encoder: Any, **options: Any) -> CaptionDataModule:
    """Return a data module that prepares training batches for an encoder."""
    data = CaptionDataModule(source, **options)
    data.encoder = encoder
    data.setup("fit")
    return data


def cached_features(folder: Path, *, images: int, locations: int, dim: int, batch_size: int, vocabulary: int) -> Any:
    """Return a data module of random features in a cache, as ``scripts/extract_features.py`` writes it, in one file."""
    encoder = CachedEncoder(locations, dim)
    paths, shape = [f"{number}.jpg" for number in range(images)], (locations, dim)
    options: Any = {"paths": paths, "fingerprint": encoder.fingerprint(), "shape": shape}
    writer = FeatureWriter(folder, "train", **options, shard_images=images)
    while writer.done < images:
        writer.write(torch.rand(min(50, images - writer.collected), *shape))
    source = RandomCaptions(folder, paths, vocabulary)
    return data_module(source, encoder, batch_size=batch_size, features=str(folder))


def endless(data: CaptionDataModule, device: torch.device) -> Iterator[CaptionBatch]:
    """Yield training batches on the device, epoch after epoch."""
    loader = data.train_dataloader()
    while True:
        for batch in loader:
            yield batch.to(device, non_blocking=True)


def one_by_one(data: CaptionDataModule, device: torch.device) -> Iterator[CaptionBatch]:
    """Yield training batches, each read when it is asked for, in the thread that asks, and then on the device."""
    loader = data.train_dataloader()
    while True:
        for numbers in loader.sampler:
            yield loader.dataset[numbers].to(device)  # type: ignore[index] # the sampler yields lists


def cold(folder: Path, encoder: CachedEncoder, *, batch_size: int, rounds: int) -> tuple[Timing, Timing]:
    """Time random batches of a cache that is not in memory, and ``pread`` alone of as many bytes from the same file."""
    file, draw = folder / "train/00000.npy", np.random.default_rng(0)
    size = 2 * math.prod(encoder.grid_size) * encoder.annotation_dim
    ours, limit = [], []
    with file.open("rb") as handle:
        os.fsync(handle.fileno())

        def seconds(read: Callable[[], Any]) -> float:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            read()
            return time.perf_counter() - start

        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for _ in range(rounds):
            features = FeatureCache(folder, "train", encoder.fingerprint())
            rows = np.sort(draw.choice(len(features), min(batch_size, len(features)), replace=False))
            ours.append(seconds(partial(features.gather, rows)))
            del features  # what is mapped stays in memory
            limit.append(seconds(lambda at=rows: [os.pread(handle.fileno(), size, 128 + size * row) for row in at]))
    return Timing(tuple(ours)), Timing(tuple(limit))


def waiting_share(
    batches: Iterator[CaptionBatch], step: Callable[[CaptionBatch], None], *, steps: int, device: torch.device
) -> float:
    """Return the share of the time of training steps, 0 to 1, in which the next batch was waited for."""
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


def measure(device: torch.device, *, quick: bool, rounds: int, folder: Path) -> Report:
    """Time both kinds of loaders, and the share of training steps that is spent waiting for cached features."""
    sizes = cases(quick)["512"].sizes
    B, L, D, V = sizes.images, sizes.locations, sizes.annotation_dim, sizes.vocabulary
    images = B * (3 if quick else 10)
    cached = cached_features(folder / "features", images=images, locations=L, dim=D, batch_size=B, vocabulary=V)
    names = [path.name for path in photographs(folder / "jpegs", B, photograph_size(quick))]
    network = encoders(quick)["conv" if quick else "mobilenet"]()
    photos = data_module(RandomCaptions(folder / "jpegs", names, V), network, batch_size=B)
    coldly = None
    if hasattr(os, "posix_fadvise"):  # before anything maps the file: mapped pages stay in memory
        coldly = cold(folder / "features", CachedEncoder(L, D), batch_size=B, rounds=rounds)
    probe = Probe.sized(device, quick=quick)
    subjects: dict[str, Callable[[], Any]] = {
        name: partial(next, one_by_one(data, device)) for name, data in (("features", cached), ("jpegs", photos))
    }
    features = FeatureCache(folder / "features", "train", CachedEncoder(L, D).fingerprint())
    mapped, draw = np.load(folder / "features/train/00000.npy", mmap_mode="r"), np.random.default_rng(0)
    subjects["gather"] = lambda: features.gather(draw.integers(images, size=B))
    subjects["plain"] = lambda: torch.from_numpy(mapped[draw.integers(images, size=B)])
    # What a process maps for the first time it waits for, and a row that is not in memory has the next ones announced.
    features.gather(torch.arange(images))
    mapped.max()
    for name in ("features", "gather", "plain"):
        for _ in range(2 * images // B):
            subjects[name]()
    timings = interleave(subjects | probe.operations, rounds=rounds, device=device)
    machine = probe.machine({operation: timings[operation].median for operation in probe.operations})
    traffic = 2 * B * L * D * 2  # fp16, read from the page cache and written into the batch
    width, height = photograph_size(quick)
    report = Report(machine=machine.to_dict())
    if coldly is not None:
        ours, limit = coldly
        what = f"{B} images' features at random that are not in memory; limit: pread of as many bytes"
        report.rows.append(Row("load_features_cold", what, ours, limit=limit.median, images=B))
    report.rows += [
        Row(
            "load_features",
            f"a batch of {B} images' cached features, {L} x {D} fp16, read in one thread",
            timings["features"],
            limit=traffic / machine.bandwidth,
            images=B,
        ),
        Row(
            "gather_features",
            f"reading {B} of them at random alone; earlier: indexing a memory map, as before",
            timings["gather"],
            earlier=timings["plain"],
            images=B,
        ),
        Row(
            "load_jpegs",
            f"a batch of {B} JPEGs of {width} x {height}, decoded and scaled to {network.preprocessing.size[0]} pixels "
            "in one thread",
            timings["jpegs"],
            images=B,
        ),
    ]
    for precision, dtype in PRECISIONS.items():
        step, steps = our_step(sizes, device, precision=dtype), 2 if quick else 10
        share = waiting_share(endless(cached, device), step, steps=steps, device=device)
        report.shares[f"waiting_for_cached_features_{precision}"] = share
    return report
