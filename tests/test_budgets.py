"""What a file may cost is known before it is paid: bytes, values, parameters and time, refused with the number."""

from __future__ import annotations

import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_faults import Fault, ends, faults, proves
from helpers_runs import edit_checkpoint, save_checkpoint
from torch import nn

from captioning.captioner import load
from captioning.checkpoint.io import damage_of, read_checkpoint
from captioning.cli.checks import refuse_impossible
from captioning.component import budget
from captioning.data.features.reading import FeatureCache
from captioning.errors import InputError

Edit = Callable[[dict[str, Any]], Any]


def inside(name: str, **arguments: Any) -> Edit:
    """Change arguments of the encoder or the decoder that a checkpoint describes."""
    return lambda content: content["captioning"][name]["init_args"].update(arguments)


def stride_0(content: dict[str, Any]) -> None:
    content["state_dict"]["captioner.extra"] = torch.zeros(1).expand(40_000, 40_000)


def many_lists(content: dict[str, Any]) -> None:
    """A list of ten lists of ten lists .., each kept once: 10**40 values in a few hundred bytes."""
    value: Any = ["x"]
    for _ in range(40):
        value = [value] * 10
    content["captioning"]["settings"] = {"model": value}


def in_itself(content: dict[str, Any]) -> None:
    content["captioning"]["settings"] = loop = {}
    loop["loop"] = loop


def sparse(content: dict[str, Any]) -> None:
    content["state_dict"]["captioner.extra"] = torch.sparse_coo_tensor([[0], [0]], [1.0], (10**6, 10**6))


MODELS = {
    Fault("an encoder of 20,000 stages", "describes a model of 10,001 modules or more"): inside(
        "encoder", channels=[1] * 20_000, strides=[1] * 20_000
    ),
    Fault("an encoder of 340 million parameters", "parameters or more; 10,"): inside(
        "encoder", channels=[4096] * 2, strides=[1] * 2
    ),
    Fault("an encoder whose places alone take 275 GB", "describes a model "): inside(
        "encoder", channels=[4096], strides=[1], image_size=4096
    ),
    Fault("a decoder of `hidden_dim 65536`", "describes a model "): inside("decoder", hidden_dim=65_536),
    Fault("a tensor of stride 0 that claims 6.4 GB", "extra claims 6,400,000,000 bytes of 4; it was edited"): stride_0,
    Fault("a sparse tensor that claims 4 TB", "extra is no plain tensor; it was edited"): sparse,
    Fault("lists in lists that stand for 10^40 values", "stands for more than 2,000,000 values"): many_lists,
    Fault("settings that are inside themselves", "stands for more than 2,000,000 values"): in_itself,
}


@faults(MODELS)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:Validating sparse")
def test_a_model_that_costs_more_than_its_file_is_refused_at_once(tmp_path, capsys, monkeypatch, fault, case):
    monkeypatch.setattr("captioning.component._FREE_PARAMETERS", 10_000_000)
    path = save_checkpoint(tmp_path / "a.ckpt")
    edit_checkpoint(path, case)
    started = time.process_time()
    assert str(path) in ends(capsys, fault, load, path)
    assert time.process_time() - started < 10


@proves(Fault("a section of 2 GB deflated to 2 MB", "a checkpoint is not compressed"))
def test_a_compressed_archive_is_not_unpacked(tmp_path, capsys, fault):
    path = save_checkpoint(tmp_path / "a.ckpt")
    with zipfile.ZipFile(path) as archive:
        sections = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sections.items():
            archive.writestr(name, content + bytes(50_000_000 * name.endswith("data.pkl")))
    started = time.process_time()
    line = ends(capsys, fault, load, path)
    assert "claims 50,0" in line and f"bytes in a file of {path.stat().st_size:,}" in line
    assert "claims 50" in str(damage_of(path))
    assert time.process_time() - started < 5


COUNTS = {
    Fault("a resumed run that has completed -10^9 epochs", "loops.fit_loop.epoch_progress.current.completed is -1"): {
        "loops": {"fit_loop": {"epoch_progress": {"current": {"completed": -(10**9)}}}}
    },
    Fault("a run resumed at step -5", "global_step is -5, which no run counts"): {"global_step": -5},
    Fault("a run resumed at epoch NaN", "epoch is nan, which no run counts; it was edited"): {"epoch": float("nan")},
    Fault("batches counted to 10^30", "which no run counts; it was edited"): {"loops": {"fit_loop": [10**30]}},
}


@faults(COUNTS)
def test_counts_that_no_run_reaches_are_refused(tmp_path, capsys, fault, case):
    path = save_checkpoint(tmp_path / "a.ckpt")
    edit_checkpoint(path, lambda content: content.update(case))
    ends(capsys, fault, lambda: read_checkpoint(path, training=True))


def test_a_decoder_is_no_larger_than_its_file(tmp_path):
    """A published encoder may be; the matrices of a wide LSTM would take minutes to be made orthogonal."""
    path = save_checkpoint(tmp_path / "a.ckpt")
    edit_checkpoint(path, inside("decoder", hidden_dim=4000))
    with pytest.raises(InputError, match=r"parameters or more; 1,0\d\d,\d\d\d are allowed"):
        load(path)


def test_a_budget_counts_what_is_built_and_no_other_model(monkeypatch):
    monkeypatch.setattr("captioning.component._FREE_PARAMETERS", 10)
    with budget(100):
        nn.Linear(9, 11)  # 110 parameters
    with budget(0), budget(100):
        nn.Linear(9, 11)
    with pytest.raises(InputError, match="a model of 110 parameters or more; 109 are allowed"), budget(99):
        nn.Linear(9, 11)
    with pytest.raises(InputError, match="parameters"), budget(0):
        nn.BatchNorm1d(6)  # 12 parameters, and statistics
    nn.Linear(9, 11)


def test_memory_is_not_taken_before_it_is_counted():
    """65,536 x 65,536 x 4 numbers are 69 GB. Where the system promises no memory, PyTorch says so."""
    with pytest.raises(InputError, match=r"17,179,869,184 parameters|needs more memory.* 68719476736 bytes"), budget(1):
        nn.LSTMCell(65_536, 65_536)


class Namespace(dict):
    __getattr__ = dict.__getitem__


@proves(Fault("`--trainer.num_nodes 3` where nothing starts the others", "--trainer.num_nodes 3: nothing has started"))
def test_a_run_does_not_wait_for_machines_that_nobody_started(capsys, monkeypatch, fault):
    for name in ("MASTER_ADDR", "SLURM_JOB_ID", "LSB_JOBID"):
        monkeypatch.delenv(name, raising=False)
    stopping = Namespace(patience=3)
    checkpoint = Namespace(save_top_k=1, filename="best")
    trainer = Namespace(accelerator="cpu", devices="1", num_nodes=3, precision=None)
    config = Namespace(trainer=trainer, early_stopping=stopping, data={}, model={}, checkpoint=checkpoint)
    ends(capsys, fault, refuse_impossible, config)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    refuse_impossible(config)


def test_a_shard_of_features_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "00000.npy")
    cache = object.__new__(FeatureCache)
    cache._manifest = Namespace(array=lambda shard: Path(tmp_path, f"{shard:05d}.npy"), shard_bytes=lambda shard: 4096)
    cache._checked = set()
    with pytest.raises(InputError, match="is no regular file"):
        cache._open(0)
