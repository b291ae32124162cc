"""Modules, data and trainers that train within a second, and the command line in this process."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint

from captioning.attention import AdditiveScore, Attention, SoftAttention
from captioning.cli.fit import fit
from captioning.cli.parser import run_command
from captioning.cli.score import score
from captioning.data.shapes import ShapesSource
from captioning.decoding import BeamOptions
from captioning.encoders import ConvEncoder
from captioning.model import AttentionDecoder, Output
from captioning.training import CaptionDataModule, CaptioningModule
from captioning.training.datamodule import VocabularyOptions


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
    **options: Any,
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


def make_trainer(folder: Path, **options: Any) -> pl.Trainer:
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "max_epochs": 1,
        "limit_val_batches": 1,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(default_root_dir=folder, **defaults | options)


def last_checkpoint(folder: Path, **options: Any) -> ModelCheckpoint:
    """Return the callback that writes FOLDER/last.ckpt as that of the command line: after an exception, too."""
    defaults = {"save_on_train_epoch_end": True, "save_on_exception": True, "enable_version_counter": False}
    return ModelCheckpoint(folder, "last", **defaults | options)


def make_data(source: ShapesSource, *, max_words: int | None = None, **options: Any) -> CaptionDataModule:
    options = {"batch_size": 8, "eval_batch_size": 3, "num_workers": 0} | options
    return CaptionDataModule(source, vocabulary=VocabularyOptions(max_words=max_words), **options)


class Signal(pl.Callback):
    """Sends this process a signal in the middle of its n-th step, counted from 1."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        self.step, self.number = step, number

    def on_before_backward(self, trainer: pl.Trainer, module: pl.LightningModule, loss: torch.Tensor) -> None:
        if trainer.global_step == self.step - 1:
            os.kill(os.getpid(), self.number)


def command(*words: str) -> Any:
    """Run `captioning fit`, `validate`, `test` or `predict`. For fit, return the ``Fit`` with trainer and module."""
    if words[0] != "fit":
        return run_command(f"captioning {words[0]}", score, words[1:], task=words[0])
    return fit(list(words[1:]))


def enter(folder: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write ``config`` as FOLDER/tiny.yaml, make the folder the working directory of a test, and return it."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["captioning"])
    monkeypatch.delenv("CAPTIONING_RUN_FOLDER", raising=False)
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    return folder


def assert_equal(ones: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert ones.keys() == others.keys()
    for name, value in ones.items():
        torch.testing.assert_close(others[name], value, rtol=0, atol=0, msg=name, equal_nan=True)
