"""Images to annotations: reading JPEGs, the network, and whole extraction."""

from __future__ import annotations

import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.report import Report, Row
from benchmarks.timing import Setup, interleave
from captioning.data.extraction import extract_features
from captioning.data.records import CaptionIndex, ImageEntry
from captioning.encoders import Encoder, MobileNetV1

_BATCH = 32


def photographs(folder: Path, count: int) -> CaptionIndex:
    """Write JPEGs of the size and smoothness of Flickr8k's photographs; returns their index."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    entries = []
    for number in range(count):
        coarse = Image.fromarray(draw.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)
        entries.append(ImageEntry(number, f"{number}.jpg", ["a photograph"]))
    return CaptionIndex.build(folder, entries)


def measure(setup: Setup) -> Report:
    """Time MobileNetV1 with one thread and with all, and report how fast extraction is beside the network."""
    report = Report()
    side, count = (64, 4) if setup.quick else (224, 6 * _BATCH)
    torch.manual_seed(0)
    encoder = MobileNetV1(12, weights=None, image_size=side).to(setup.device).eval()
    index = photographs(setup.folder / "photographs", count)
    threads = torch.get_num_threads()
    try:
        for used in sorted({1, threads}) if setup.device.type == "cpu" else [threads]:
            torch.set_num_threads(used)
            report.extend(_measure_threads(encoder, index, setup, used))
    finally:
        torch.set_num_threads(threads)
    return report


def _measure_threads(encoder: Encoder, index: CaptionIndex, setup: Setup, threads: int) -> Report:
    count, output = len(index), setup.folder / "extracted"
    images = torch.randn(min(_BATCH, count), 3, *encoder.preprocessing.size, device=setup.device)
    options = {"device": setup.device, "batch_size": len(images), "num_workers": min(8, threads)}

    @torch.inference_mode()
    def network() -> None:
        for _ in range(0, count, len(images)):
            encoder(images)

    def extract() -> None:
        shutil.rmtree(output, ignore_errors=True)
        with redirect_stdout(StringIO()):
            extract_features(encoder, {"train": index}, output, **options)

    def read_jpegs() -> None:
        for row in range(count):
            encoder.preprocessing.view(index.image(row, encoder.preprocessing))

    described = {
        "read_jpegs": "JPEGs of 500 x 375 pixels to the network's input, one after the other, without the network",
        "network": "MobileNetV1 as an encoder",
        "extraction": "JPEGs of 500 x 375 pixels to features on the disk",
    }
    timings = interleave({"read_jpegs": read_jpegs, "network": network, "extraction": extract}, setup)
    name = f"{threads}_thread" + "s" * (threads > 1)
    rows = [
        Row(f"{subject}_{name}", f"{described[subject]}; {name.replace('_', ' ')}", timing.per_item(count), items=1)
        for subject, timing in timings.items()
    ]
    return Report(rows, {f"extraction_of_network_{name}": timings["extraction"].speedup_over(timings["network"])})
