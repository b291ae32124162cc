"""Refusals of Lightning, wandb and other libraries when a run starts are one line; a fault keeps its traceback."""

import csv
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import wandb
from helpers_faults import command, refusal
from helpers_runs import tiny_config
from helpers_training import enter

from captioning.cli import IMPORTED_MODULES
from captioning.cli.fit import Fit

FIT = ["fit", "--config", "tiny.yaml"]
OWN = """
import wandb
from pytorch_lightning import Callback
from pytorch_lightning.loggers import CSVLogger

class Needs(CSVLogger):
    def __init__(self, save_dir: str) -> None:
        raise ModuleNotFoundError("needs nowhere; pip install nowhere")

class Faulty(Callback):
    def on_train_start(self, trainer, module) -> None:
        raise ValueError("a fault")

class FaultyLater(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if batch_idx == 1:
            raise ValueError("a later fault")

class Emptying(Callback):
    def on_train_start(self, trainer, module) -> None:
        trainer.fit_loop.epoch_loop.automatic_optimization = None

class Interrupted(Callback):
    def on_fit_start(self, trainer, module) -> None:
        raise KeyboardInterrupt

class Silent(Callback):
    def on_train_start(self, trainer, module) -> None:
        raise wandb.errors.CommError("no answer")
"""


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Iterator[Path]:
    (tmp_path / "own.py").write_text(OWN)
    handler = signal.getsignal(signal.SIGTERM)
    yield enter(tmp_path, tiny_config(tmp_path / "shapes"), monkeypatch)
    IMPORTED_MODULES.clear()  # another command line of a user is another process
    signal.signal(signal.SIGTERM, handler)  # a run that ends in a fault keeps its own handler


@pytest.fixture
def nobody(workdir, monkeypatch) -> Iterator[None]:
    """A user without a login to wandb, which reads its environment again, before the test and after it."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.setenv(name, "")  # so that the end of the test restores it
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(workdir / "netrc"))
    wandb.teardown()
    yield
    wandb.teardown()


def test_what_lightning_refuses_when_training_starts_is_one_line(workdir, capsys):
    assert "`val_check_interval` (500) must be less than" in refusal(capsys, *FIT, "--trainer.val_check_interval", 500)


def test_a_missing_library_of_a_logger_is_one_line(workdir, capsys):
    line = refusal(capsys, *FIT, "--import", "own", "--trainer.logger", "own.Needs")
    assert line.startswith("error: 'own.Needs': needs nowhere; pip install nowhere")


def test_an_interruption_before_the_first_step_ends_as_a_later_one(workdir, capsys):
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        command(*FIT, "--import", "own", "--trainer.callbacks", "own.Interrupted")
    signal.signal(signal.SIGINT, handler)  # Lightning ignores further interruptions
    assert ended.value.code == 130 and "interrupted" in capsys.readouterr().err
    assert not Path("runs/tiny").exists()


def test_strings_that_read_as_numbers_stay_strings_in_the_configuration_of_a_run(workdir):
    wandb_id = "--trainer.logger.init_args.id=59374e09"  # one id in seventy is like this
    (logger, _) = Fit([*FIT[1:], "--trainer.logger", "WandbLogger", wandb_id]).settings["trainer"]["logger"]
    assert logger["init_args"]["id"] == "59374e09"


@pytest.mark.parametrize(
    ("callback", "error", "message"),
    [("Faulty", ValueError, "a fault"), ("Emptying", AttributeError, "'NoneType' object has no attribute")],
)
def test_a_fault_keeps_its_traceback_also_where_lightning_meets_it(workdir, callback, error, message):
    with pytest.raises(error, match=message):
        command(*FIT, "--import", "own", "--trainer.callbacks", f"own.{callback}")


def test_a_run_that_fails_inside_an_epoch_keeps_its_finished_steps(workdir):
    with pytest.raises(ValueError, match="a later fault"):
        command(*FIT, "--import", "own", "--trainer.callbacks", "own.FaultyLater")
    checkpoints = Path("runs/tiny/checkpoints")
    assert [file.name for file in checkpoints.iterdir()] == ["last.ckpt"]
    assert torch.load(checkpoints / "last.ckpt", weights_only=True)["global_step"] == 1


@pytest.mark.slow
def test_one_callback_is_a_list_of_one_and_a_logger_needs_no_folder(workdir):
    command(*FIT, "--trainer.callbacks", "LearningRateMonitor", "--trainer.logger", "CSVLogger")
    (file,) = Path("runs/tiny").rglob("metrics.csv")
    with file.open() as rows:
        assert "lr-Adam/pg1" in next(csv.reader(rows))
    command(*FIT, "--config", "runs/tiny/config.yaml", "--name", "again")  # its own places are none of the user's
    assert Path("runs/again/checkpoints/best.ckpt").is_file()


def test_a_run_that_reaches_no_validation_says_that_it_kept_no_best_checkpoint(workdir, capsys):
    command(*FIT, "--trainer.check_val_every_n_epoch", 5)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("no best checkpoint: training ended after ") and "val/bleu4" in last


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("WANDB_API_KEY", "abc", "API key must have 40+ characters"), ("WANDB_MODE", "online", "No API key configured")],
)
def test_wandb_without_a_login_or_with_a_bad_key_is_one_line(nobody, monkeypatch, capsys, name, value, message):
    monkeypatch.setenv(name, value)
    line = refusal(capsys, *FIT, "--trainer.logger", "true")
    assert line.startswith("error: trainer.logger: WandbLogger: ") and message in line
    assert line.endswith("set WANDB_MODE=offline, or --trainer.logger false (fit) or --no_logger (test)")


def test_without_a_login_training_and_its_test_log_offline(nobody, capsys):
    command(*FIT, "--trainer.logger", "true")
    wandb.teardown()
    os.environ.pop("WANDB_MODE")  # a test is a process of its own
    assert "to upload: wandb sync runs/tiny/wandb/offline-run-*" in capsys.readouterr().out
    command("test", "--ckpt_path", "runs/tiny/checkpoints/best.ckpt")
    assert "written to runs/tiny" in capsys.readouterr().out
    assert len(list(Path("runs/tiny/wandb").glob("offline-run-*"))) == 2


@pytest.mark.slow
def test_a_test_prints_its_metrics_before_wandb_refuses(nobody, monkeypatch, capsys):
    command(*FIT, "--trainer.logger", "true")
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "online")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        command("test", "--ckpt_path", "runs/tiny/checkpoints/best.ckpt")
    printed = capsys.readouterr()
    assert "BLEU-4" in printed.out and printed.err.rstrip().endswith("--no_logger (test)")


@pytest.mark.slow
def test_a_run_without_a_monitor_keeps_its_newest_checkpoint_and_resumes(workdir):
    command(*FIT, "--checkpoint.monitor", "null")
    command("fit", "--ckpt_path", "runs/tiny/checkpoints/last.ckpt", "--trainer.max_epochs", "2")
    assert Path("runs/tiny/checkpoints/best.ckpt").is_file()


@pytest.mark.slow
def test_wandb_without_a_network_logs_offline(nobody, monkeypatch, capsys, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    command(*FIT, "--trainer.logger", "true")
    assert "wandb does not answer, so this run logs offline" in caplog.text
    assert (
        capsys.readouterr().out.splitlines()[-1].startswith("wandb ran offline; to upload: wandb sync runs/tiny/wandb")
    )
    (folder,) = Path("runs/tiny/wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb"))


def test_an_error_of_wandb_during_training_is_one_line(workdir, capsys):
    assert refusal(capsys, *FIT, "--import", "own", "--trainer.callbacks", "own.Silent") == "error: no answer"
