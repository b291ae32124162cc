"""How long a command takes from being typed: a new Python process each time, files in the page cache."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.images import encoders, photograph_size, photographs
from benchmarks.report import Report, Row
from benchmarks.timing import interleave
from captioning.attention import AdditiveScore, SoftAttention
from captioning.checkpoint.format import CHECKPOINT_FORMAT
from captioning.encoders import Encoder
from captioning.model import AttentionDecoder
from captioning.model.captioner import Captioner
from captioning.vocabulary import Vocabulary

_ROOT = Path(__file__).resolve().parent.parent


def measure(*, quick: bool, rounds: int, folder: Path) -> Report:
    """Time ``captioning --help`` and ``scripts/caption_image.py`` of one image, on the CPU."""
    (image,) = photographs(folder / "startup", 1, photograph_size(quick))
    commands = {"startup_help": (["-m", "captioning", "--help"], "captioning --help")}
    for name, build in encoders(quick).items():
        if name == "vgg19":
            continue  # not a light encoder: half a gigabyte of random weights to write first
        checkpoint = save_checkpoint(folder / f"{name}.ckpt", build(), quick=quick)
        script = ["scripts/caption_image.py", str(image), "--checkpoint", str(checkpoint), "--device", "cpu"]
        commands[f"startup_caption_{name}"] = (script, f"caption_image.py, one image, {name} encoder")

    def run(arguments: list[str]) -> Callable[[], Any]:
        return lambda: subprocess.run([sys.executable, *arguments], cwd=_ROOT, check=True, stdout=subprocess.DEVNULL)

    subjects = {name: run(arguments) for name, (arguments, _) in commands.items()} | {
        "torch": run(["-c", "import torch"])
    }
    timings = interleave(subjects, rounds=rounds, device=torch.device("cpu"))
    return Report(
        [
            Row(name, what, timings[name], import_torch=timings["torch"] if "caption" in name else None)
            for name, (_, what) in commands.items()
        ]
    )


def save_checkpoint(path: Path, encoder: Encoder, *, quick: bool) -> Path:
    """Write what a training run leaves of a model with random weights."""
    A, E, H, V = (5, 7, 8, 23) if quick else (512, 512, 512, 2539)
    vocabulary = Vocabulary([f"w{i}" for i in range(V - 4)])
    decoder = AttentionDecoder(SoftAttention(AdditiveScore(A)), embedding_dim=E, hidden_dim=H)
    content = {
        "format": CHECKPOINT_FORMAT,
        "encoder": encoder.to_config(),
        "decoder": decoder.to_config(),
        "preprocessing": encoder.preprocessing.to_dict(),
        "vocabulary": list(vocabulary.words),
        "settings": {},
    }
    captioner = Captioner(encoder, decoder, vocabulary_size=len(vocabulary))
    weights = {f"captioner.{name}": tensor for name, tensor in captioner.state_dict().items()}
    torch.save({"state_dict": weights, "captioning": content}, path)
    return path
