"""Print what moving code must not change: losses of 30 training steps and captions with alphas, to the last bit.

Each model is trained on shapes on one thread of the CPU. Its checkpoint then captions validation images with beams of
1, 3 and 5. Two versions of the code compute the same if they print the same:

    python benchmarks/trace.py > before.txt
    python benchmarks/trace.py > after.txt && diff before.txt after.txt
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from captioning.inference import load

MODELS = ("soft", "hard", "multihead", "local", "summed")  # configs/shapes_NAME.yaml
BEAMS = (1, 3, 5)
IMAGES = 8
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "WANDB_MODE": "disabled", "CUDA_VISIBLE_DEVICES": ""}


def train(name: str, steps: int, runs: Path) -> Path:
    """Train and return the run's folder."""
    command = [
        *(sys.executable, "-m", "captioning", "fit", "--config", f"configs/shapes_{name}.yaml"),
        *("--runs", str(runs), "--name", name, "--trainer.logger=false"),
        *("--trainer.accelerator=cpu", "--trainer.precision=32-true", "--trainer.max_epochs=1"),
        *(f"--trainer.limit_train_batches={steps}", "--trainer.log_every_n_steps=1", "--trainer.limit_val_batches=1"),
        *("--trainer.enable_progress_bar=false", "--data.num_workers=0", "--data.limit_images=1600"),
    ]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return runs / name


def losses(folder: Path) -> list[str]:
    """Return a line for every logged number."""
    (path,) = folder.glob("metrics/version_*/metrics.csv")
    with path.open(newline="") as file:
        return [
            f"step {row['step']} {name} {float(value).hex()}"
            for row in csv.DictReader(file)
            for name, value in sorted(row.items())
            if value and name.startswith(("train/", "val/")) and not name.endswith("per_second")
        ]


def captions(name: str, checkpoint: Path) -> Iterator[str]:
    """Yield a line for each beam and image: the caption, its score, and a digest of alphas and betas."""
    captioner = load(checkpoint)
    images = sorted(Path("data/shapes/val").glob("*.png"))[:IMAGES]
    for beam in BEAMS:
        for path, caption in zip(images, captioner.caption(images, beam_size=beam), strict=True):
            digest = hashlib.sha256(caption.alphas.tobytes() + np.asarray(caption.betas).tobytes()).hexdigest()[:16]
            yield f"{name} beam {beam} {path.name}: {caption.text} {float(caption.log_prob).hex()} {digest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="training steps of each model (default: 30)")
    parser.add_argument("--checkpoint", type=Path, nargs="*", default=[], help="further checkpoints to caption with")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        for name in MODELS:
            folder = train(name, args.steps, Path(scratch))
            for line in losses(folder):
                print(name, line, flush=True)
            for line in captions(name, folder / "checkpoints" / "last.ckpt"):
                print(line, flush=True)
    for number, checkpoint in enumerate(args.checkpoint, 1):
        for line in captions(f"checkpoint {number}", checkpoint):
            print(line, flush=True)


if __name__ == "__main__":
    main()
