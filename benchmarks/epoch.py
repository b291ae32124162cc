"""An epoch of COCO's size, simulated: its captions and its features, and training on them for a while.

The decoders of the shipped configs are trained on features in place of the encoder. The captions file has COCO 2017's
layout, caption lengths and vocabulary. The features of its 118,287 images are a file with a hole in it: only the first
images (0.8 GB) take room on the disk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.loading import data_module, endless
from benchmarks.models import FeatureSource
from benchmarks.report import Report, Row
from benchmarks.timing import Setup, Timing, wait_for
from benchmarks.training import our_step
from benchmarks.work import Sizes
from captioning.cli.build import build
from captioning.data import CocoSource
from captioning.data.features import create, note
from captioning.data.records import CaptionIndex
from captioning.model import Decoder
from captioning.settings import read_config
from captioning.training.datamodule import CaptionDataModule, VocabularyOptions

IMAGES, CAPTIONS, WORDS = 118_287, 591_753, 27_000
CONFIGS = ("coco_vgg19_soft", "coco_vgg19_hard", "coco_vgg19_summed", "coco_vgg19_transformer")
_RANDOM = 4096  # images whose features are numbers
_ROOT = Path(__file__).resolve().parent.parent
_TINY_LSTM = ("hidden_dim=8", "embedding_dim=7", "attention.init_args.score.init_args.attention_dim=5")
_TINY_TRANSFORMER = (
    *("layers=1", "dim=8", "heads=2", "feedforward_dim=8", "attention.init_args.heads=2"),
    *("annotation_layer.init_args.dim=8", "annotation_layer.init_args.heads=2"),
)


class Scale(NamedTuple):
    """Images and captions of the split, sizes of a batch, and training steps a round."""

    images: int
    captions: int
    locations: int
    dim: int
    batch_size: int
    steps: int


def write_captions(path: Path, *, images: int = IMAGES, captions: int = CAPTIONS) -> Path:
    """Write a file with COCO 2017's layout, caption lengths, and numbers of frequent and rare words."""
    draw = np.random.default_rng(0)
    ids = np.sort(draw.choice(581_929, images, replace=False)).tolist()
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    spelt = ("".join(letters[draw.integers(26, size=n)]) for n in draw.integers(2, 11, 2 * WORDS))
    words = list(dict.fromkeys(spelt))[:WORDS]
    words[100:WORDS:97] = [f"{word}'s" for word in words[100:WORDS:97]]  # for the tokeniser
    words[50:WORDS:101] = [f"{word}," for word in words[50:WORDS:101]]
    probabilities = np.arange(10, WORDS + 10) ** -1.673  # about 9,490 words occur five times or more, as in COCO
    owners = draw.permutation(np.r_[np.arange(images), draw.integers(images, size=captions - images)]).tolist()
    lengths = np.clip(draw.gamma(20, 0.52, captions).round(), 5, 49).astype(int).tolist()
    drawn = iter(draw.choice(WORDS, int(sum(lengths)), p=probabilities / probabilities.sum()).tolist())

    def annotations() -> Iterator[str]:
        for number, (owner, length) in enumerate(zip(owners, lengths, strict=True)):
            text = " ".join(words[next(drawn)] for _ in range(length)).capitalize() + "."
            yield json.dumps({"image_id": ids[owner], "id": number, "caption": text})

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"info": {"year": 2017}, "images": [')
        file.write(", ".join(json.dumps({"file_name": f"{number:012d}.jpg", "id": number}) for number in ids))
        file.write('], "annotations": [')
        file.write(", ".join(annotations()))
        file.write("]}")
    return path


def sparse_features(folder: Path, paths: list[str], encoder: FeatureSource) -> None:
    """Write features of a training split, random for the first images; the rest is a hole that takes no disk."""
    shape = encoder.grid_size[0] * encoder.grid_size[1], encoder.annotation_dim
    rows, _ = create(folder, "train", encoder.fingerprint(), paths, shape)
    rows[:_RANDOM] = torch.rand(*rows[:_RANDOM].shape)
    note(folder, "train", len(paths))


def training_split(scale: Scale, setup: Setup) -> tuple[CaptionIndex, CaptionDataModule]:
    """Write captions and features of COCO's size; return the training split and its data module."""
    root, features = setup.folder / "coco_epoch", setup.folder / "epoch"
    for split, fraction in (("train", 1), ("val", 20)):  # COCO's validation images are a twentieth
        path = root / f"annotations/captions_{split}2017.json"
        write_captions(path, images=scale.images // fraction, captions=scale.captions // fraction)
    source, encoder = CocoSource(str(root)), FeatureSource(scale.locations, scale.dim)
    index = source.index("train")
    sparse_features(features, index.paths, encoder)
    data = data_module(
        source, encoder, batch_size=scale.batch_size, features=str(features), vocabulary=VocabularyOptions(min_count=5)
    )
    return index, data


def decoder_of(config: str, *, quick: bool) -> Decoder:
    """Return the decoder of a shipped config, or a tiny one of its kind."""
    tiny = (_TINY_TRANSFORMER if "transformer" in config else _TINY_LSTM) if quick else ()
    options = [f"--model.decoder.init_args.{option}" for option in tiny]
    (decoder,) = build({"model.decoder": Decoder}, [read_config(_ROOT / f"configs/{config}.yaml")], options)
    return decoder


def measure(setup: Setup) -> Report:
    """Train each decoder in bf16 for some steps a round, and report the time of an epoch that follows."""
    device = setup.device
    if setup.quick:
        scale = Scale(200, 1000, 4, 6, batch_size=8, steps=2)
    else:
        scale = Scale(IMAGES, CAPTIONS, 196, 512, batch_size=1024 if device.type == "cuda" else 64, steps=10)
    index, data = training_split(scale, setup)
    words = len(data.vocabulary)
    tokens = int(index.caption_lengths.sum()) + len(index.captions)  # with <end>
    batches = endless(data, device)
    steps = {}
    for config in CONFIGS:
        decoder = decoder_of(config, quick=setup.quick)
        sizes = Sizes(1, (1,), scale.locations, scale.dim, 0, 0, 0, words)  # the decoder has its own sizes
        steps[config] = our_step(sizes, device, precision=torch.bfloat16, decoder=decoder)
        for _ in range(3):
            steps[config](next(batches))
    seconds: dict[str, list[float]] = {config: [] for config in CONFIGS}
    waited = elapsed = 0.0
    for _ in range(setup.rounds):
        for config, step in steps.items():
            lengths = []  # summed afterwards: reading a number waits for the device
            wait_for(device)
            start = time.perf_counter()
            for _ in range(scale.steps):
                asked = time.perf_counter()
                batch = next(batches)
                waited += time.perf_counter() - asked
                step(batch)
                lengths.append(batch.lengths)
            wait_for(device)
            taken = time.perf_counter() - start
            elapsed += taken
            seconds[config].append(taken * tokens / sum(int(batch_lengths.sum()) for batch_lengths in lengths))
    description = (
        f"{len(index.captions):,} captions, {tokens:,} tokens of {words:,} words, bf16, from {scale.steps} measured "
        f"steps a round; features of {len(index):,} images, {_RANDOM} of them random; "
        f"B={scale.batch_size} L={scale.locations} D={scale.dim}"
    )
    rows = [
        Row(f"epoch_{config}", description, Timing(tuple(taken)), items=tokens, unit="tokens")
        for config, taken in seconds.items()
    ]
    return Report(rows, fractions={"epoch_waiting_for_features": waited / elapsed})
