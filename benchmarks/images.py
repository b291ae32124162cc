"""Encoders, and the whole way from a JPEG file to a caption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.report import Report, Row
from benchmarks.timing import interleave
from benchmarks.work import Probe, Work
from captioning.attention import AdditiveScore, SoftAttention
from captioning.captioner import ImageCaptioner
from captioning.encoders import ConvEncoder, Encoder, TorchvisionEncoder
from captioning.model import AttentionDecoder
from captioning.model.captioner import Captioner
from captioning.vocabulary import SPECIALS, Vocabulary


def photograph_size(quick: bool) -> tuple[int, int]:
    """(width, height) in pixels."""
    return (64, 48) if quick else (640, 480)


def photographs(folder: Path, count: int, size: tuple[int, int]) -> list[Path]:
    """Write JPEGs that take as long to decode as photographs do: soft shapes with some noise."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    width, height = size
    paths = []
    for number in range(count):
        coarse = Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC)).astype(np.int16)
        pixels += draw.integers(-12, 13, (height, width, 1), dtype=np.int16)
        path = folder / f"{number}.jpg"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)
        paths.append(path)
    return paths


def encoders(quick: bool) -> dict[str, Callable[[], Encoder]]:
    """Return what builds each encoder, with random weights."""
    if quick:
        return {"conv": lambda: ConvEncoder((4, 6), (4, 2), image_size=16)}
    return {
        "conv": ConvEncoder,
        "mobilenet": lambda: TorchvisionEncoder("mobilenet_v3_large", "features.12", weights=None),
        "vgg19": lambda: TorchvisionEncoder("vgg19", "features.35", weights=None),
    }


def encode(device: torch.device, *, quick: bool, rounds: int) -> Report:
    """Time encoders on batches of images that are already tensors."""
    batch = 2 if quick else 16
    probe = Probe.sized(device, quick=quick)
    networks = {name: build().eval().requires_grad_(False).to(device) for name, build in encoders(quick).items()}
    images = {
        name: torch.randn(batch, 3, *network.preprocessing.size, device=device) for name, network in networks.items()
    }

    def subject(name: str) -> Callable[[], Any]:
        return torch.inference_mode()(lambda: networks[name](images[name]))

    timings = interleave({name: subject(name) for name in networks} | probe.operations, rounds=rounds, device=device)
    machine = probe.machine({operation: timings[operation].median for operation in probe.operations})
    rows = []
    for name, network in networks.items():
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(images[name])
        flops = counter.get_total_flops()
        traffic = images[name].nbytes + sum(parameter.nbytes for parameter in network.parameters())
        rows.append(
            Row(
                f"encode_{name}",
                f"{batch} images of {network.preprocessing.size[0]} pixels, fp32, random weights; "
                f"{flops / batch / 1e9:.2f} GFLOP an image",
                timings[name],
                limit=machine.seconds(Work(flops, 0, traffic), torch.float32),
                images=batch,
            )
        )
    return Report(rows, machine=machine.to_dict())


_SEARCH = {"beam_size": 5, "min_length": 11, "max_length": 12}  # random weights must not choose the length


def caption(device: torch.device, *, quick: bool, rounds: int, folder: Path) -> Report:
    """Time the whole way from JPEG files to captions, images in batches and one at a time."""
    count = 4 if quick else 32
    width, height = photograph_size(quick)
    paths = photographs(folder / "photographs", count, (width, height))
    report = Report()
    for name, build in encoders(quick).items():
        captioner = _random_captioner(build(), quick).to(device)
        words = [f"w{i}" for i in range(captioner.decoder.vocabulary_size - len(SPECIALS))]
        images = ImageCaptioner(captioner, Vocabulary(words))
        few = paths[: max(1, count // 8)]

        def batched(images: ImageCaptioner = images) -> None:
            images.caption(paths, **_SEARCH)

        def alone(images: ImageCaptioner = images, few: list[Path] = few) -> None:
            for path in few:
                images.caption(path, **_SEARCH)

        timings = interleave({"batched": batched, "alone": alone}, rounds=rounds, device=device)
        what = f"JPEG of {width} x {height} to caption of 11 or 12 words, beam 5, {name}"
        report.rows += [
            Row(f"caption_{name}", f"{what}; 16 images at a time", timings["batched"], images=count),
            Row(f"caption_{name}_one_at_a_time", f"{what}; one image at a time", timings["alone"], images=len(few)),
        ]
    return report


def _random_captioner(encoder: Encoder, quick: bool) -> Captioner:
    torch.manual_seed(2)
    A, E, H, V = (5, 7, 8, 23) if quick else (512, 512, 512, 2539)
    decoder = AttentionDecoder(SoftAttention(AdditiveScore(A)), embedding_dim=E, hidden_dim=H)
    return Captioner(encoder, decoder, vocabulary_size=V)
