"""Several processes on one machine compute what one computes. All of them are real ones, which talk by gloo."""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from captioning.cli.fit import main
from helpers_runs import tiny_config

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


SRUN = """#!/bin/bash
# Two tasks on this machine with what SLURM tells them; its exit code is the highest of theirs.
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2 \\
        MASTER_ADDR=127.0.0.1 "$@" &
    pids+=($!)
done
printf "%s\\n" "${pids[@]}" > tasks
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || { this=$?; [ $this -gt $code ] && code=$this; }
done
exit $code
"""


@pytest.mark.slow
def test_a_slurm_job_that_is_asked_to_stop_is_requeued_and_ends_as_if_nothing_had_happened(tmp_path):
    """The script of docs/scale.md, with two local processes for srun, and a signal that reaches one of them alone."""
    config = tiny_config(tmp_path / "shapes", train=40)
    config["trainer"] |= {"devices": 2, "strategy": "ddp", "max_epochs": 3}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "$@" >> requeued\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parent.parent
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        "PYTHONPATH": str(root),
        "PYTHON": sys.executable,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "captioning",
        "SLURM_NTASKS": "2",
        "MASTER_PORT": str(port),
    }

    def job(name: str) -> subprocess.Popen[str]:
        command = [str(root / "scripts/slurm_fit.sh"), name, "--config", "tiny.yaml"]
        with (tmp_path / f"{name}.log").open("a") as output:
            return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=output, text=True)

    assert job("whole").wait(timeout=600) == 0, (tmp_path / "whole.log").read_text()
    stopped = job("stopped")
    deadline = time.monotonic() + 600
    while "epoch 1," not in (tmp_path / "stopped.log").read_text():
        assert stopped.poll() is None and time.monotonic() < deadline, (tmp_path / "stopped.log").read_text()
        time.sleep(0.05)
    os.kill(int((tmp_path / "tasks").read_text().split()[1]), signal.SIGTERM)
    assert stopped.wait(timeout=600) == 143, (tmp_path / "stopped.log").read_text()
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"
    assert job("stopped").wait(timeout=600) == 0, (tmp_path / "stopped.log").read_text()
    ends = [
        torch.load(tmp_path / f"runs/{name}/checkpoints/last.ckpt", weights_only=True) for name in ("whole", "stopped")
    ]
    assert ends[0]["global_step"] == ends[1]["global_step"]
    for name, value in ends[0]["state_dict"].items():
        assert torch.equal(ends[1]["state_dict"][name], value), name
    assert not (tmp_path / "runs/stopped-2").exists()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_a_run_whose_processes_are_all_killed_goes_on_to_the_last_bit(tmp_path, processes):
    config = tiny_config(tmp_path / "shapes", train=40)
    config["trainer"] |= {"devices": processes, "strategy": "ddp", "max_epochs": 3}
    config["data"]["source"]["init_args"]["val"] = 4
    config["last"] = {"every_n_train_steps": 1, "every_n_epochs": None}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    root = Path(__file__).parent.parent

    def run(*options: str) -> subprocess.Popen[str]:
        with (tmp_path / "log").open("w") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "captioning", "fit", *options],
                cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)},
                stdout=output, stderr=output, text=True, start_new_session=True,
            )  # fmt: skip

    assert run("--config", "tiny.yaml", "--name", "whole").wait(timeout=600) == 0, (tmp_path / "log").read_text()
    killed = run("--config", "tiny.yaml", "--name", "killed")
    last = tmp_path / "runs/killed/checkpoints/last.ckpt"
    deadline = time.monotonic() + 600
    while not last.is_file() or torch.load(last, weights_only=True)["global_step"] < 4:
        assert killed.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
    os.killpg(killed.pid, signal.SIGKILL)
    assert killed.wait(timeout=60) == -signal.SIGKILL
    assert run("--ckpt_path", str(last)).wait(timeout=600) == 0, (tmp_path / "log").read_text()
    whole, resumed = (
        torch.load(tmp_path / f"runs/{name}/checkpoints/last.ckpt", weights_only=True) for name in ("whole", "killed")
    )
    assert whole["global_step"] == resumed["global_step"] > 4
    for name, value in whole["state_dict"].items():
        assert torch.equal(resumed["state_dict"][name], value), name
