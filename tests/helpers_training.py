"""Modules, data and trainers small enough to fit in a second."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from captioning.cli.fit import main
from captioning.training.checkpoint_io import AtomicCheckpointIO

from captioning.attention import AdditiveScore, Attention, SoftAttention
from captioning.data.shapes import ShapesSource
from captioning.decoding import BeamOptions
from captioning.encoders import ConvEncoder
from captioning.model import AttentionDecoder, Output
from captioning.training.callbacks import NamedCheckpoint
from captioning.training.datamodule import CaptionDataModule, VocabularyOptions
from captioning.training.module import CaptioningModule


def make_shapes(folder: Path, **counts: int) -> ShapesSource:
    """Return shapes of 48 x 48 pixels, drawn into ``folder``; ``counts``: train, val and test."""
    source = ShapesSource(str(folder / "shapes"), image_size=48, **counts)
    source.prepare()
    return source


def make_module(
    attention: Attention | None = None,
    output: Output | None = None,
    *,
    hidden_dim: int = 14,
    dropout: float = 0.3,
    lr: float = 3e-3,
    standardize: bool = False,
    **options,
) -> CaptioningModule:
    torch.manual_seed(3)
    encoder = ConvEncoder((8, 12), (4, 2), image_size=48)
    decoder = AttentionDecoder(
        attention or SoftAttention(AdditiveScore(10)),
        embedding_dim=9,
        hidden_dim=hidden_dim,
        dropout=dropout,
        output=output,
        standardize_annotations=standardize,
    )
    options = {"search": BeamOptions(beam_size=2, max_length=12)} | options
    return CaptioningModule(encoder, decoder, optimizer=lambda p: torch.optim.Adam(p, lr=lr), **options)


def make_trainer(folder: Path, **options) -> pl.Trainer:
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "plugins": [AtomicCheckpointIO()],
        "max_epochs": 1,
        "limit_val_batches": 1,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(default_root_dir=folder, **defaults | options)


def last_checkpoint(folder: Path, **options: Any) -> NamedCheckpoint:
    """What writes FOLDER/last.ckpt, as the command line's does: after an exception, too."""
    return NamedCheckpoint(folder, "last", **{"save_on_exception": True, "enable_version_counter": False} | options)


def make_data(source: ShapesSource, *, max_words: int | None = None, **options) -> CaptionDataModule:
    options = {"batch_size": 8, "eval_batch_size": 3, "num_workers": 0} | options
    return CaptionDataModule(source, vocabulary=VocabularyOptions(max_words=max_words), **options)


def run_stage(stage: Callable[..., Any], module: CaptioningModule, data: CaptionDataModule, **options) -> Any:
    """Let a trainer's ``fit``, ``test`` .. work on a module and its data."""
    module.connect(data)
    return stage(module, datamodule=data, **options)


def trained_folder(folder: Path, config: dict[str, Any]) -> Path:
    """Train a configuration in a folder by the command line, as runs/tiny, and return the folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["captioning"])
        Path("tiny.yaml").write_text(yaml.safe_dump(config))
        main(["fit", "--config", "tiny.yaml"])
    return folder


def enter_copy(folder: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy a folder, make the copy the working directory of a test, and return it."""
    shutil.copytree(folder, copy)
    monkeypatch.chdir(copy)
    monkeypatch.setattr(sys, "argv", ["captioning"])
    return copy
