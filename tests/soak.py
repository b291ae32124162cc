#!/usr/bin/env python
"""Caption 10,000 images, and train for 50 short epochs, and see how much memory grows.

Prints the resident memory after a tenth of the work, when caches are warm, and at the end; exit code 1 if the
difference is more than ``LIMIT``.

example:
  python tests/soak.py --json docs/measurements/soak.json
"""

from __future__ import annotations

import argparse
import gc
import logging
import resource
import shlex
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers import random_view
from helpers_runs import save_checkpoint
from helpers_training import make_data, make_module, make_shapes, make_trainer, run_stage
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelCheckpoint

from captioning.captioner import load
from captioning.files import write_json
from captioning.provenance import provenance

CAPTIONS, EPOCHS, LIMIT = 10_000, 50, 20.0  # the last in MB


def resident() -> float:
    """Return this process's memory in MB, after what is garbage is gone."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def caption(folder: Path) -> dict[str, float]:
    captioner = load(save_checkpoint(folder / "best.ckpt"))
    images = [random_view(30, 20, seed=seed) for seed in range(100)]
    after: list[float] = []
    for _ in range(CAPTIONS // len(images)):
        for found in captioner(images, max_length=6):
            assert found.words is not None and found.trace.alphas.shape[1] == 9
        after.append(resident())
    return {"after_a_tenth": after[len(after) // 10], "at_the_end": after[-1]}


class Memory(Callback):
    def __init__(self) -> None:
        self.after: list[float] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.after.append(resident())


def train(folder: Path) -> dict[str, float]:
    source = make_shapes(folder, train=10, val=4, test=3)
    memory = Memory()
    last = ModelCheckpoint(folder, "last", enable_version_counter=False)
    trainer = make_trainer(folder, max_epochs=EPOCHS, enable_checkpointing=True, callbacks=[memory, last])
    run_stage(trainer.fit, make_module(), make_data(source))
    assert trainer.current_epoch == EPOCHS == len(memory.after)
    return {"after_a_tenth": memory.after[EPOCHS // 10], "at_the_end": memory.after[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and where they come from")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    work: dict[str, Callable[[Path], dict[str, float]]] = {"captions": caption, "epochs": train}
    found = {}
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for what, run in work.items():
            values = {place: round(value, 1) for place, value in run(Path(name)).items()}
            found[what] = values | {"growth": round(values["at_the_end"] - values["after_a_tenth"], 1)}
            print(f"{what}: {found[what]}", flush=True)
    if args.json is not None:
        content = {"values": found, "unit": "MB of resident memory", "captions": CAPTIONS, "epochs": EPOCHS}
        command = f"python tests/soak.py {shlex.join(sys.argv[1:])}"
        write_json(args.json, content | provenance(command=command, seed=3))
    return int(any(values["growth"] > LIMIT for values in found.values()))


if __name__ == "__main__":
    sys.exit(main())
