"""Several processes on one machine compute what one computes. All of them are real ones, which talk by gloo."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers_runs import tiny_config

from captioning.training.cli import main

SEVERAL = [2, pytest.param(3, marks=pytest.mark.slow)]
HARD = {
    "class_path": "captioning.attention.HardAttention",
    "init_args": {"score": {"class_path": "captioning.attention.AdditiveScore"}, "inference": "sample"},
}


def captioning(folder: Path, *args: str, processes: int, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command in ``folder``, as a user does, with so many processes on the CPU."""
    command = [sys.executable, "-m", "captioning", *args, "--trainer.accelerator", "cpu"]
    if processes > 1:
        command += ["--trainer.devices", str(processes), "--trainer.strategy", "ddp"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a run of hard attention that draws in testing too, tested in one process: 5 images, 2 a batch."""
    folder = tmp_path_factory.mktemp("ddp")
    config = copy.deepcopy(tiny_config(folder / "shapes", test=5, eval_batch_size=2))
    config["model"]["decoder"]["init_args"]["attention"] = HARD
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["captioning"])
        main(["fit", "--config", "tiny.yaml"])
        main(["test", "--config", "tiny.yaml"])
    return folder


@pytest.mark.parametrize("processes", SEVERAL)
def test_processes_that_share_a_test_split_leave_the_files_of_one(trained, processes):
    """To the last digit: BLEU and the rest, NLL, bounds, and captions that were drawn."""
    results = f"by-{processes}"
    captioning(trained, "test", "--config", "tiny.yaml", "--results", results, processes=processes)
    for name in ("test_captions.json", "test_metrics.json", "test_results.json"):
        assert (trained / results / name).read_bytes() == (trained / "runs/tiny" / name).read_bytes(), name
    captions = json.loads((trained / results / "test_captions.json").read_text())
    assert len({caption["image_id"] for caption in captions}) == len(captions) == 5
    metrics = json.loads((trained / results / "test_metrics.json").read_text())
    assert {"test/bleu4", "test/cider_d", "test/nll", "test/bound"} <= metrics.keys()
