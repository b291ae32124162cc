"""An epoch of COCO's size, simulated: its captions, its number of feature files, and training on them for a while.

What is trained are the decoders of the shipped configs, with those features instead of the encoder.

The captions file has COCO 2017's layout, caption lengths and vocabulary. The features of its 118,287 images are in as
many shards as they would be, but only a few of the files hold numbers of their own (1 GB), the others are links to
these: reading finds them in memory, as on a machine with much of it. What a disk adds is ``load_features_cold``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.coco import CAPTIONS, IMAGES, write_captions
from benchmarks.loading import CachedEncoder, data_module, endless
from benchmarks.memory import resident
from benchmarks.report import Report, Row
from benchmarks.timing import Timing, interleave, wait_for
from benchmarks.training import our_step
from benchmarks.work import Machine, Probe, Sizes, Work
from captioning.cli.build import build
from captioning.data import CocoSource
from captioning.data.features import FeatureWriter
from captioning.data.records import CaptionIndex
from captioning.model import Decoder
from captioning.settings import read_config
from captioning.training.datamodule import CaptionDataModule

GPUS = {
    "A100": Machine({torch.float32: 19.5e12, torch.bfloat16: 312e12}, 2.04e12),
    "H100": Machine({torch.float32: 67e12, torch.bfloat16: 989e12}, 3.35e12),
}
"""Of the 80 GB modules with NVLink, as their data sheets say, without sparsity."""
_FILES = 8
_COUNTED = "coco_vgg19_soft"
CONFIGS = (_COUNTED, "coco_vgg19_hard", "coco_vgg19_marginal", "coco_vgg19_transformer")
"""What is trained. The work of the first is counted; of the others it is known how many times as long they take."""
_ROOT = Path(__file__).resolve().parent.parent
_TINY = {"attention_dim": 5, "embedding_dim": 7, "hidden_dim": 8}
_TINY_LSTM = (
    *(f"{size}={_TINY[size]}" for size in ("hidden_dim", "embedding_dim")),
    f"attention.init_args.score.init_args.attention_dim={_TINY['attention_dim']}",
)
_TINY_TRANSFORMER = (
    *("layers=1", "dim=8", "heads=2", "feedforward_dim=8", "attention.init_args.heads=2"),
    *("annotation_layer.init_args.dim=8", "annotation_layer.init_args.heads=2"),
)


class Scale(NamedTuple):
    """Images and captions of the split, features, and the decoder."""

    images: int
    captions: int
    locations: int
    dim: int
    batch_size: int
    steps: int
    decoder: dict[str, int]

    @classmethod
    def of(cls, device: torch.device, *, quick: bool) -> Scale:
        """Return COCO's with the paper's decoder, or something tiny."""
        if quick:
            return cls(200, 1000, 4, 6, 8, 2, _TINY)
        decoder = {"attention_dim": 512, "embedding_dim": 512, "hidden_dim": 1800}
        return cls(IMAGES, CAPTIONS, 196, 512, 1024 if device.type == "cuda" else 64, 10, decoder)


def linked_features(folder: Path, paths: list[str], encoder: CachedEncoder, *, shard_images: int | None) -> None:
    """Write random features of a training split; from the ninth shard on they are links to the first eight."""
    options: Any = {
        "paths": paths,
        "fingerprint": encoder.fingerprint(),
        "shape": (encoder.grid_size[0] * encoder.grid_size[1], encoder.annotation_dim),
        "shard_images": shard_images,
    }
    manifest = FeatureWriter(folder, "train", **options).manifest
    for shard in {*range(min(_FILES, manifest.shards)), manifest.shards - 1}:
        writer = FeatureWriter(folder, "train", **options, process=(shard, manifest.shards))
        while writer.done < writer.total:
            writer.write(torch.rand(min(50, writer.total - writer.collected), *writer.shape[1:]))
    for shard in range(_FILES, manifest.shards - 1):
        os.link(manifest.array(shard % _FILES), manifest.array(shard))


def training_split(scale: Scale, folder: Path, *, shard_images: int | None) -> tuple[CaptionIndex, CaptionDataModule]:
    """Write captions and features of COCO's size; returns the training split and what makes batches of it."""
    root, features, encoder = folder / "coco_epoch", folder / "epoch", CachedEncoder(scale.locations, scale.dim)
    for split, share in (("train", 1), ("val", 20)):  # COCO's validation images are a twentieth
        path = root / f"annotations/captions_{split}2017.json"
        write_captions(path, images=scale.images // share, captions=scale.captions // share)
    source = CocoSource(str(root))
    index = source.index("train")
    linked_features(features, list(index.paths), encoder, shard_images=shard_images)
    data = data_module(source, encoder, batch_size=scale.batch_size, features=str(features), min_count=5, seed=1)
    return index, data


def work_of(images: int, lengths: Tensor, scale: Scale, vocabulary: int) -> Work:
    """Return the work of a training step on a batch of images and captions of these lengths."""
    found = tuple(lengths.tolist())
    sizes = Sizes(images, found, scale.locations, scale.dim, **scale.decoder, vocabulary=vocabulary)
    return Work.of_training(sizes, torch.bfloat16)


def decoder_of(config: str, *, quick: bool) -> Decoder:
    """Return the decoder of a shipped config, or one of the same kind and tiny."""
    tiny = (_TINY_TRANSFORMER if "transformer" in config else _TINY_LSTM) if quick else ()
    options = [f"--model.decoder.init_args.{option}" for option in tiny]
    (decoder,) = build({"model.decoder": Decoder}, [read_config(_ROOT / f"configs/{config}.yaml")], options)
    return decoder


def measure(device: torch.device, *, quick: bool, rounds: int, folder: Path) -> Report:
    """Train in bf16 for some steps a round; report what an epoch follows to take, here and on other machines."""
    scale = Scale.of(device, quick=quick)
    index, data = training_split(scale, folder, shard_images=16 if quick else None)
    words = len(data.vocabulary)
    tokens = int(index.caption_lengths.sum()) + len(index.captions)  # with each <end>
    batches = endless(data, device)
    some = Sizes(1, (1,), scale.locations, scale.dim, **scale.decoder, vocabulary=words)
    steps = {}
    for config in CONFIGS:
        decoder = decoder_of(config, quick=quick)
        steps[config] = our_step(some, device, precision=torch.bfloat16, decoder=decoder)
        for _ in range(3):
            steps[config](next(batches))

    probe = Probe.sized(device, quick=quick)
    seconds: dict[str, list[float]] = {config: [] for config in CONFIGS}
    limits, memory = [], {"anonymous": [resident("RssAnon")], "mapped": [resident("RssFile")]}
    waited = elapsed = 0.0
    trained, counted = 0, Work(0, 0, 0)
    for _ in range(rounds):
        speed = interleave(probe.operations, rounds=1, device=device)
        machine = probe.machine({name: timing.median for name, timing in speed.items()})
        for config, step in steps.items():
            done = []  # looked at afterwards: reading a number waits for the device
            wait_for(device)
            start = time.perf_counter()
            for _ in range(scale.steps):
                asked = time.perf_counter()
                batch = next(batches)
                waited += time.perf_counter() - asked
                step(batch)
                done.append((len(batch.rows), batch.lengths))
            wait_for(device)
            taken = time.perf_counter() - start
            said = sum(int(lengths.sum()) for _, lengths in done)
            elapsed += taken
            seconds[config].append(taken / said * tokens)
            if config == _COUNTED:
                work = Work(0, 0, 0)
                for images, lengths in done:
                    work = work.plus(work_of(images, lengths, scale, words))
                limits.append(machine.seconds(work, torch.bfloat16) / said * tokens)
                trained, counted = trained + said, counted.plus(work)
        memory["anonymous"].append(resident("RssAnon"))
        memory["mapped"].append(resident("RssFile"))
    timings = {config: Timing(tuple(each)) for config, each in seconds.items()}
    limit = Timing(tuple(limits))
    what = (
        f"{len(index.captions):,} captions, {tokens:,} tokens of {words:,} words, bf16, from {scale.steps} measured "
        f"steps a round; features of {len(index):,} images in links to {_FILES} files; {_sizes(scale)}"
    )
    report = Report(machine=machine.to_dict())
    report.shares["epoch_waiting_for_features"] = waited / elapsed
    report.memory_over_time = {f"epoch_{kind}": sizes for kind, sizes in memory.items()}
    for config, timing in timings.items():
        first = config == _COUNTED
        row = Row(f"epoch_{config}", what, timing, limit=limit.median if first else None, soft=timings[_COUNTED])
        report.rows.append(row._replace(images=len(index.captions)))
        report.rates[f"epoch_{config}_tokens"] = tokens / timing.median
        for name, gpu in GPUS.items():
            bound = gpu.seconds(counted, torch.bfloat16) / trained * tokens
            report.scaled |= {f"epoch_{config}_{name}_limit": bound} if first else {}
            report.scaled[f"epoch_{config}_{name}"] = bound * limit.ratio(timing)
    return report


def _sizes(scale: Scale) -> str:
    named = {"B": scale.batch_size, "L": scale.locations, "D": scale.dim}
    named |= {name[0].upper(): size for name, size in scale.decoder.items()}
    return " ".join(f"{letter}={size}" for letter, size in named.items())
