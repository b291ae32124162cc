"""An epoch of COCO's size on a GPU, from training steps on cached features with their loader."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from benchmarks.loading import cached_features, endless
from benchmarks.report import Report, Row
from benchmarks.timing import Timing, wait_for
from benchmarks.training import our_step
from benchmarks.work import Sizes

CAPTIONS = 566_747
"""Of Karpathy's training split with ``restval``."""


def measure(device: torch.device, *, quick: bool, rounds: int, folder: Path) -> Report:
    """Measure training steps with their loader and return the seconds of as many as an epoch has, in bf16.

    H is 1800 as in the paper; features are 196 x 512 in fp16, each batch of one caption per image.
    """
    sizes = (
        Sizes(3, (4,) * 3, 4, 6, 5, 7, 8, 23) if quick else Sizes(1024, (12,) * 1024, 196, 512, 512, 512, 1800, 9490)
    )
    steps = 2 if quick else 20
    data = cached_features(
        folder / "epoch",
        images=sizes.images * 4,
        locations=sizes.locations,
        dim=sizes.annotation_dim,
        batch_size=sizes.images,
        vocabulary=sizes.vocabulary,
    )
    batches = endless(data, device)
    step = our_step(sizes, device, precision=torch.bfloat16)
    for _ in range(3):
        step(next(batches))
    seconds = []
    for _ in range(rounds):
        wait_for(device)
        start = time.perf_counter()
        for _ in range(steps):
            step(next(batches))
        wait_for(device)
        seconds.append((time.perf_counter() - start) / steps * CAPTIONS / sizes.images)
    what = f"{CAPTIONS:,} captions, bf16, cached features, from {steps} measured steps a round; {sizes}"
    return Report([Row("epoch_coco", what, Timing(tuple(seconds)), images=CAPTIONS)])
