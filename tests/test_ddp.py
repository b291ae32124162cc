"""Several processes on one machine compute the results of one, and resume. They are real processes, with gloo."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers_runs import tiny_config

ROOT = Path(__file__).parent.parent
HARD = {
    "class_path": "captioning.attention.HardAttention",
    "init_args": {
        "score": {"class_path": "captioning.attention.AdditiveScore"},
        "sample_probability": 0.5,
        "context_mode": "sample",
    },
}


def start(folder: Path, log: str, *words: str, **environment: str) -> subprocess.Popen[str]:
    names = {name: value for name, value in os.environ.items() if name != "CAPTIONING_RUN_FOLDER"}
    with (folder / log).open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "captioning", *words],
            cwd=folder,
            env=names | {"PYTHONPATH": str(ROOT)} | environment,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def weights_of(folder: Path, name: str) -> dict[str, Any]:
    return torch.load(folder / f"runs/{name}/checkpoints/last.ckpt", weights_only=True)


def two_processes(folder: Path, **last: Any) -> None:
    config = tiny_config(folder / "shapes", train=40)
    config["trainer"] |= {"devices": 2, "strategy": "ddp", "max_epochs": 3}
    config["model"]["decoder"]["init_args"] |= {"attention": HARD, "dropout": 0.3}
    config["last"] = last
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))


def assert_same_end(folder: Path, name: str) -> None:
    whole, other = weights_of(folder, "whole"), weights_of(folder, name)
    assert whole["global_step"] == other["global_step"]
    for key, value in whole["state_dict"].items():
        assert torch.equal(other["state_dict"][key].nan_to_num(), value.nan_to_num()), key  # nan: no such step yet


@pytest.mark.slow
def test_two_processes_that_were_killed_or_stopped_resume_equal_to_the_last_bit(tmp_path):
    two_processes(tmp_path, every_n_train_steps=2, every_n_epochs=None)
    log, last = tmp_path / "log", tmp_path / "runs/{}/checkpoints/last.ckpt"
    assert start(tmp_path, "log", "fit", "--config", "tiny.yaml", "--name", "whole").wait(300) == 0, log.read_text()
    for name, number, code in (("killed", signal.SIGKILL, -9), ("stopped", signal.SIGTERM, 143)):
        run = start(tmp_path, "log", "fit", "--config", "tiny.yaml", "--name", name)
        path = Path(str(last).format(name))
        wait_until(path.is_file, run, log)
        os.killpg(run.pid, number) if number == signal.SIGKILL else os.kill(run.pid, number)
        assert run.wait(timeout=60) == code, log.read_text()
        assert start(tmp_path, "log", "fit", "--ckpt_path", str(path)).wait(300) == 0, log.read_text()
        assert_same_end(tmp_path, name)


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


def test_tasks_of_a_slurm_array_are_runs_of_their_own_and_a_requeued_task_keeps_its_name(tmp_path):
    def fit(**environment: str) -> str:
        words = [str(ROOT / "scripts/slurm_fit.sh"), "n", "--config", "tiny.yaml"]
        names = {"PATH": os.environ["PATH"], "LAUNCH": "echo", "SLURM_ARRAY_TASK_ID": "3"} | environment
        return subprocess.run(words, cwd=tmp_path, env=names, check=True, capture_output=True, text=True).stdout

    killed = tmp_path / "runs/n_3/config.yaml"  # before its first checkpoint
    killed.parent.mkdir(parents=True)
    killed.touch()
    assert "fit --name n_3 --config tiny.yaml" in fit() and killed.exists()
    assert "fit --name n_3 --config tiny.yaml" in fit(SLURM_RESTART_COUNT="1") and not killed.exists()


@pytest.mark.slow
def test_a_stopped_slurm_job_is_requeued_and_ends_as_an_uninterrupted_job(tmp_path):
    """The script of docs/scale.md, with two local processes for srun, and a signal that reaches one of them alone."""
    two_processes(tmp_path)
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "$@" >> requeued\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    unset = ("SLURM", "CAPTIONING_RUN_FOLDER")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(unset)},
        "PYTHONPATH": str(ROOT),
        "PYTHON": sys.executable,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "captioning",
        "SLURM_NTASKS": "2",
        "MASTER_PORT": str(port),
    }

    def job(name: str) -> subprocess.Popen[str]:
        words = [str(ROOT / "scripts/slurm_fit.sh"), name, "--config", "tiny.yaml"]
        with (tmp_path / f"{name}.log").open("a") as output:
            return subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=output, stderr=output, text=True)

    assert job("whole").wait(timeout=600) == 0, (tmp_path / "whole.log").read_text()
    stopped, log = job("stopped"), tmp_path / "stopped.log"
    wait_until(lambda: "epoch 1," in log.read_text(), stopped, log)
    os.kill(int((tmp_path / "tasks").read_text().split()[1]), signal.SIGTERM)
    assert stopped.wait(timeout=600) == 143, log.read_text()
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"
    assert job("stopped").wait(timeout=600) == 0, log.read_text()
    assert_same_end(tmp_path, "stopped")
    assert not (tmp_path / "runs/stopped-2").exists()
