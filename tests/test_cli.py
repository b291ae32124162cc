"""`captioning fit`, `validate`, `test` and `predict`: what users type, and what it leaves behind."""

import ast
import csv
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers_runs import tiny_config
from helpers_training import command, enter
from pytorch_lightning.utilities import rank_zero_only

from captioning.__main__ import main
from captioning.cli.export import export
from captioning.cli.fit import Fit, fit
from captioning.data import ShapesSource
from captioning.errors import InputError
from captioning.inference import load
from captioning.run_folder import RunFolder, checksum
from captioning.settings import STORAGE_SETTINGS
from captioning.tokenizers import PennTreebank
from captioning.vocabulary import UNK

ROOT = Path(__file__).parent.parent
EXACT = ["--precision", "32-true"]  # `load` computes in float32, too
BEST, LAST = (f"runs/tiny/checkpoints/{name}.ckpt" for name in ("best", "last"))


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    """An empty folder with one small config, entered."""
    return enter(tmp_path, tiny_config(tmp_path / "shapes"), monkeypatch)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A folder with the run runs/tiny, and its model exported."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        enter(folder, tiny_config(folder / "shapes"), patch)
        command("fit", "--config", "tiny.yaml")
        export(model=BEST, output=Path("exported"))
    return folder


@pytest.fixture
def trained(run_folder, tmp_path, monkeypatch) -> Path:
    """A copy of that folder, entered."""
    shutil.copytree(run_folder, tmp_path / "copy")
    return enter(tmp_path / "copy", tiny_config(run_folder / "shapes"), monkeypatch)


def metrics_of(folder: str, stage: str = "test") -> dict[str, Any]:
    return json.loads(Path(folder, f"{stage}_metrics.json").read_text())


def captions_of(folder: str) -> list[dict[str, Any]]:
    return json.loads(Path(folder, "test_captions.json").read_text())


def shapes_folder() -> Path:
    return Path(yaml.safe_load(Path("tiny.yaml").read_text())["data"]["source"]["init_args"]["root"])


def step_of(checkpoint: str) -> int:
    return torch.load(checkpoint, weights_only=True)["global_step"]


FEW = "; BLEU of fewer than 100 images says little"


# fit


def test_fit_then_test_from_the_checkpoint_alone(workdir, capsys):
    command("fit", "--config", "tiny.yaml", "--trainer.callbacks=null")
    run = Path("runs/tiny")
    assert (run / "config.yaml").is_file() and Path(LAST).is_file()
    assert list((run / "figures").iterdir())  # every run has figures, speed and its lines
    with next(run.glob("metrics/*/metrics.csv")).open() as file:
        assert {"train/loss", "train/captions_per_second", "train/learning_rate"} <= set(next(csv.reader(file)))
    printed = capsys.readouterr().out
    assert "run folder: runs/tiny" in printed and "best checkpoint: " in printed
    assert printed.count(f"{FEW})\n") == 1
    assert re.search(r"^epoch 1, step 2, \d+ s: train/loss [\d.]+ val/nll [\d.]+ val/bleu4", printed, re.MULTILINE)
    command("test", "--ckpt_path", BEST)
    written = metrics_of("runs/tiny")
    assert written["conditions"]["weights"] == checksum(BEST)
    assert set(written) >= {"test/bleu1", "test/bleu4", "test/nll"} and written["provenance"]["seed"] == 1
    printed = capsys.readouterr().out
    assert f"in percent{FEW}\n" in printed
    assert "test split, 2 images; beam 1" in printed and f"tokens: {PennTreebank.description}" in printed
    command("validate", "--ckpt_path", BEST)
    command("predict", "--ckpt_path", LAST)
    assert metrics_of("runs/tiny", "val") and (run / "predictions.jsonl").is_file()


def test_a_second_run_gets_its_own_folder_and_a_resumed_run_keeps_its_folder(trained):
    command("fit", "--config", "tiny.yaml")
    assert Path("runs/tiny-2/checkpoints/last.ckpt").is_file()
    cli = command("fit", "--ckpt_path", LAST, "--trainer.max_epochs", "2")
    assert cli.plan.folder.path == Path("runs/tiny") and cli.trainer.current_epoch == 2
    cli = command("fit", "--config", "tiny.yaml", "--name", "tiny", "--ckpt_path", "last", "--trainer.max_epochs", "3")
    assert cli.plan.folder.path == Path("runs/tiny") and cli.trainer.current_epoch == 3
    assert not Path("runs/tiny-3").exists()


def test_a_configuration_names_files_beside_it_and_the_machine_is_recorded(workdir):
    config = yaml.safe_load(Path("tiny.yaml").read_text())
    config["trainer"]["accelerator"] = "auto"
    Path("mine").mkdir()
    for name, content in {"data": config["data"], "main": config | {"data": "data.yaml"}}.items():
        Path(f"mine/{name}.yaml").write_text(yaml.safe_dump(content))
    command("fit", "--config", "mine/main.yaml")
    command("test", "--ckpt_path", "runs/main/checkpoints/best.ckpt", *EXACT)
    log = yaml.safe_load(Path("runs/main/metrics/version_0/hparams.yaml").read_text())
    for provenance in (log["provenance"], metrics_of("runs/main")["provenance"]):
        assert provenance["used"].pop("device") in ("cpu", "cuda")
        assert provenance["used"].pop("processes", 1) == 1  # of a training
        assert provenance["used"] == {"precision": "32-true", "num_workers": 0}


@pytest.mark.slow
def test_runs_that_start_together_have_folders_of_their_own(workdir, capsys):
    first = Fit(["--config", "tiny.yaml", "--seed_everything", "7"])
    command("fit", "--config", "tiny.yaml")
    first.train()
    seeds = [
        yaml.safe_load(Path(f"runs/{name}/config.yaml").read_text())["seed_everything"] for name in ("tiny", "tiny-2")
    ]
    assert seeds == [7, 1] and step_of(LAST) == step_of("runs/tiny-2/checkpoints/last.ckpt") == 2
    assert "run folder: runs/tiny-2 (runs/tiny is taken)" in capsys.readouterr().out.splitlines()


def test_a_run_that_ends_while_it_prepares_data_leaves_its_name_free(workdir, monkeypatch):
    """As a scheduler ends it."""
    monkeypatch.setattr(ShapesSource, "prepare", lambda self: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as left:
        command("fit", "--config", "tiny.yaml")
    assert left.value.code == 143 and not Path("runs/tiny").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("wrong", ["--data.batch_size=0", "--data.features=nowhere", "--trainer.limit_val_batches=9.5"])
def test_a_run_that_fails_to_start_leaves_its_name_free(workdir, wrong):
    with pytest.raises(InputError):
        command("fit", "--config", "tiny.yaml", wrong)
    assert not Path("runs/tiny/config.yaml").exists()
    assert Fit(["--config", "tiny.yaml"]).plan.folder.path == Path("runs/tiny")


def test_a_second_process_claims_no_folder(workdir, monkeypatch):
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/config.yaml").touch()
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    Fit(["--config", "tiny.yaml"])
    assert os.listdir("runs") == ["tiny"]


def test_a_resumed_run_without_steps_left_says_so(workdir, capsys):
    def fit(*words: str) -> list[str]:
        command("fit", *words)
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("nothing")]

    assert fit("--config", "tiny.yaml", "--trainer.max_epochs", "3", "--trainer.max_steps", "3") == []
    resume = ["--ckpt_path", LAST]
    limits = (
        "the limits are --trainer.max_epochs, max_steps, max_time, limit_train_batches and --early_stopping.patience"
    )
    assert fit(*resume) == [f"nothing is left to train after step 3; {limits}"]
    Path(f"{LAST}.17.part").touch()  # as of a run that was killed while it saved
    assert fit(*resume, "--trainer.max_steps", "-1") == [] and step_of(LAST) == 6
    assert not [*Path(LAST).parent.glob("*.part")]
    assert fit(*resume) == [f"nothing is left to train after step 6; {limits}"]


@pytest.mark.slow
def test_a_run_without_patience_left_resumes_with_a_larger_patience(workdir, capsys):
    patience, options = (
        "--early_stopping.patience",
        ["--early_stopping.monitor", "val/rouge_l", "--model.optimizer.lr", "0"],
    )
    command("fit", "--config", "tiny.yaml", "--trainer.max_epochs", "9", patience, "1", *options)
    assert step_of(LAST) == 4  # the second epoch is no better than the first
    command("fit", "--ckpt_path", LAST)
    assert "nothing is left to train after step 4; the limits are " in capsys.readouterr().out
    command("fit", "--ckpt_path", LAST, patience, "2")
    assert step_of(LAST) == 6


@pytest.mark.slow
def test_a_tilde_is_the_home_folder_for_checkpoints_and_logs(workdir, monkeypatch):
    monkeypatch.setenv("HOME", str(workdir / "home"))
    Path("home").mkdir()
    config = tiny_config(workdir / "shapes")
    del config["trainer"]["callbacks"]
    config["data"]["source"]["init_args"]["root"] = "~/shapes"
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    for _ in range(2):
        main(["fit", "--config", "tiny.yaml", "--runs=~/runs"])
        os.environ.pop("CAPTIONING_RUN_FOLDER", None)
    for folder in (Path("home/runs/tiny"), Path("home/runs/tiny-2")):
        assert {path.name for path in folder.iterdir()} == {"config.yaml", "checkpoints", "metrics", "figures"}
        assert len(list((folder / "checkpoints").iterdir())) == 2 and not list(folder.glob("metrics/version_1"))
    best = "~/runs/tiny/checkpoints/best.ckpt"
    main(["test", f"--ckpt_path={best}"])
    main(["caption", "~/shapes/test/000001.png", f"--model={best}", "--overlay=~/looked.png", "--json=~/said.jsonl"])
    assert {path.name for path in Path("home").iterdir()} >= {"runs", "shapes", "looked.png", "said.jsonl"}
    assert metrics_of("home/runs/tiny") and load(best)("~/shapes/test/000001.png").text
    assert not Path("~").exists()


@pytest.mark.parametrize(
    ("place", "folder"),
    [
        ([], "runs/tiny-2"),
        pytest.param(["--name", "tiny-4"], "runs/tiny-4", marks=pytest.mark.slow),
        (["--name", "tiny"], "runs/tiny-3"),  # another trained run is not written over
        (["--runs", "elsewhere"], "elsewhere/tiny-2"),
    ],
)
def test_a_resumed_run_stays_with_its_checkpoint_whatever_its_config_is_called(trained, place, folder):
    shutil.copytree("runs/tiny", "runs/tiny-2")
    before = {path: path.read_bytes() for path in Path("runs/tiny").rglob("*") if path.is_file()}
    last = "runs/tiny-2/checkpoints/last.ckpt"
    cli = command("fit", "--config", "tiny.yaml", "--ckpt_path", last, "--trainer.max_epochs", "2", *place)
    assert cli.plan.folder.path == Path(folder) and step_of(f"{folder}/checkpoints/last.ckpt") == 4
    assert {path: path.read_bytes() for path in Path("runs/tiny").rglob("*") if path.is_file()} == before


def test_a_checkpoint_outside_of_a_run_is_resumed_in_a_new_folder(trained):
    shutil.copy(LAST, "loose.ckpt")
    cli = command("fit", "--config", "tiny.yaml", "--ckpt_path", "loose.ckpt", "--trainer.max_epochs", "2")
    assert cli.plan.folder.path == Path("runs/tiny-2") and step_of(LAST) == 2


@pytest.mark.slow
def test_a_moved_run_resumes_in_its_new_folder_and_keeps_its_best_checkpoint(workdir):
    earliest = ["--checkpoint.monitor", "epoch", "--checkpoint.mode", "min"]  # so that no later epoch is better
    command("fit", "--config", "tiny.yaml", *earliest)
    shutil.move("runs", "elsewhere")
    best, last = (Path("elsewhere/tiny/checkpoints", name) for name in ("best.ckpt", "last.ckpt"))
    for epochs in (2, 3):
        cli = command("fit", "--ckpt_path", str(last), "--trainer.max_epochs", str(epochs))
        assert cli.plan.folder.path == Path("elsewhere/tiny") and not Path("runs").exists()
        assert (step_of(str(best)), step_of(str(last))) == (2, 2 * epochs)
        assert cli.trainer.checkpoint_callback.best_model_path == str(best.absolute())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model.decoder.init_args.hidden_dim", "9"], "size mismatch"),
        (["--data.vocabulary.max_words", "5"], "is not the data's"),
        (
            ["--model.optimizer", "torch.optim.SGD"],
            r"model\.optimizer cannot change to SGD in a resumed run; keep Adam, or begin",
        ),
        (["--model.optimizer.lr", "0.5"], r"model\.optimizer\.lr cannot change to 0\.5 in .* --init_from"),
        (
            ["--model.scheduler", "captioning.training.WarmupCosine"],
            r"model\.scheduler cannot change to WarmupCosine .*keep None, or",
        ),
    ],
)
def test_a_refused_resume_leaves_the_run_as_it_was(trained, change, message):
    files = {path: path.read_bytes() for path in (Path(LAST), Path("runs/tiny/config.yaml"))}
    with pytest.raises(InputError, match=message):
        command("fit", "--ckpt_path", LAST, "--trainer.max_epochs", "2", *change)
    assert {path: path.read_bytes() for path in files} == files


@pytest.mark.slow
def test_last_checkpoint_is_of_the_last_epoch_also_without_a_validation_after_it(workdir):
    command("fit", "--config", "tiny.yaml", "--trainer.max_epochs", "3", "--trainer.check_val_every_n_epoch", "2")
    assert (step_of(LAST), step_of(BEST)) == (6, 4)


def test_checkpoint_keeps_the_full_config_as_plain_data(workdir):
    command("fit", "--config", "tiny.yaml", "--data.batch_size", "7", "--trainer.max_steps", "1")
    settings = torch.load(LAST, weights_only=True)["captioning"]["settings"]
    assert settings["data"]["batch_size"] == 7 and settings["seed_everything"] == 1


def test_the_best_checkpoint_by_another_metric_is_printed_without_the_note_on_bleu(workdir, capsys):
    command("fit", "--config", "tiny.yaml", "--checkpoint.monitor", "val/nll", "--early_stopping.monitor", "val/nll")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("best checkpoint: ")]
    assert re.search(r"\(val/nll [\d.]+\)$", line)


def test_a_fast_dev_run_trains_one_batch_and_saves_no_checkpoint(workdir, capsys):
    command("fit", "--config", "tiny.yaml", "--trainer.fast_dev_run", "true")
    assert "epoch 1, step 1" in capsys.readouterr().out and not list(Path("runs").rglob("*.ckpt"))


def test_a_profiler_reports_where_the_time_goes(workdir, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("pytorch_lightning"), "propagate", True)
    command("fit", "--config", "tiny.yaml", "--trainer.profiler", "simple")
    assert "train_dataloader_next" in caplog.text


def test_a_checkpoint_is_written_beside_the_one_that_it_replaces(workdir, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(workdir / "none"))  # from another disk, a copy is not whole at once
    command("fit", "--config", "tiny.yaml", "--trainer.limit_val_batches", "0")
    checkpoints = workdir / "runs/tiny/checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["last.ckpt"]
    (checkpoints / "last.ckpt").rename(checkpoints / "last.ckpt.7.part")  # as a run leaves it that is killed there
    assert not RunFolder(workdir / "runs/tiny").is_trained()


@pytest.mark.slow
def test_seed_decides_the_result(workdir):
    def final(name: str, seed: int) -> torch.Tensor:
        command("fit", "--config", "tiny.yaml", "--name", name, "--seed_everything", str(seed))
        state = torch.load(f"runs/{name}/checkpoints/last.ckpt", weights_only=True)["state_dict"]
        return state["captioner.decoder.output.L_o.weight"]

    first, again, other = final("a", 5), final("b", 5), final("c", 6)
    assert torch.equal(first, again) and not torch.equal(first, other)


def weights(checkpoint: str) -> dict[str, torch.Tensor]:
    return torch.load(checkpoint, weights_only=True)["state_dict"]


@pytest.mark.slow
def test_a_second_stage_begins_with_the_weights_of_the_first_and_resumes_without_it(trained):
    objective = {"class_path": "captioning.objective.SelfCriticalTraining", "init_args": {"samples": 3, "bleu4": 0.5}}
    second = {
        "model": {"objective": objective, "optimizer": {"class_path": "torch.optim.SGD"}},
        "data": {"group": "image"},
        "checkpoint": {"monitor": "val/cider_d"},
    }
    Path("reward.yaml").write_text(yaml.safe_dump(second))
    stage = ["fit", "--config", "tiny.yaml", "--config", "reward.yaml", "--name", "second"]
    command(*stage, "--init_from", BEST, "--model.optimizer.init_args.lr", "0")  # nothing is learned
    last = "runs/second/checkpoints/last.ckpt"
    assert all(torch.equal(weights(last)[name], value) for name, value in weights(BEST).items())
    assert yaml.safe_load(Path("runs/second/config.yaml").read_text())["init_from"] == BEST
    with next(Path("runs/second/metrics").glob("*/metrics.csv")).open() as file:
        assert {"train/reward", "train/baseline", "val/nll", "val/cider_d"} <= set(next(csv.reader(file)))
    Path(BEST).unlink()
    shutil.copy("runs/tiny/checkpoints/last.ckpt", "other.ckpt")
    # The run's own settings, and what it began with: --ckpt_path wins.
    command("fit", "--ckpt_path", last, "--trainer.max_epochs", "2", "--init_from", "other.ckpt")
    kept = yaml.safe_load(Path("runs/second/config.yaml").read_text())
    assert kept["ckpt_path"] is None and kept["init_from"] == BEST and step_of(last) == 4


@pytest.mark.slow
def test_the_last_configuration_decides_the_monitored_metric(workdir):
    monitored = {}
    for metric in ("nll", "cider_d"):
        name = f"{metric}.yaml"
        monitored[name] = {part: {"monitor": f"val/{metric}"} for part in ("checkpoint", "early_stopping")}
        Path(name).write_text(yaml.safe_dump(monitored[name]))
    for files, mode in ((["nll.yaml"], "min"), (["nll.yaml", "cider_d.yaml"], "max")):
        words = ["--config", "tiny.yaml", *(word for file in files for word in ("--config", file))]
        trainer = fit([*words, "--name", mode, "--trainer.max_epochs", "0"]).trainer
        assert [trainer.checkpoint_callback.mode, trainer.early_stopping_callback.mode] == [mode, mode]
        settings = yaml.safe_load(Path(f"runs/{mode}/config.yaml").read_text())
        assert [settings["checkpoint"]["mode"], settings["early_stopping"]["mode"]] == [mode, mode]
    again = ["--config", "runs/max/config.yaml", "--checkpoint.monitor", "val/nll", "--name", "again"]
    with pytest.raises(InputError, match=r"--checkpoint\.mode max: val/nll is best at its minimum; set it to min"):
        fit(again)
    assert fit([*again, "--checkpoint.mode", "min"]).trainer.checkpoint_callback.mode == "min"


@pytest.mark.slow
def test_while_bleu_is_zero_the_lowest_nll_is_the_best_and_training_goes_on(workdir):
    two_words = ["--model.search.max_length", "2", "--early_stopping.patience", "2"]  # no 4-gram
    learns = ["--model.optimizer", "torch.optim.Adam", "--model.optimizer.lr", "0.02"]
    command("fit", "--config", "tiny.yaml", "--trainer.max_epochs", "4", *two_words, *learns)
    assert step_of(BEST) > 2 and step_of(LAST) == 8  # otherwise the first is kept, and the third epoch is the last


@pytest.mark.slow
def test_an_epoch_whose_captions_name_no_object_is_not_the_best_and_does_not_end_training(workdir):
    watched = [f"--{part}.monitor=val/pointing_accuracy" for part in ("checkpoint", "early_stopping")]
    few_words = ["--data.vocabulary.max_words", "1"]  # "a"
    cli = command("fit", "--config", "tiny.yaml", "--trainer.max_epochs", "2", *watched, *few_words)
    assert math.isnan(cli.trainer.callback_metrics["val/pointing_accuracy"])
    assert step_of(LAST) == 2 * step_of(BEST)


def test_a_model_is_fine_tuned_on_captions_with_further_words(workdir):
    command("fit", "--config", "tiny.yaml", "--data.vocabulary.max_words", "6")
    extended = ["--data.vocabulary.extend", BEST, "--model.optimizer.init_args.lr", "0"]  # nothing is learned
    command("fit", "--config", "tiny.yaml", "--name", "second", "--init_from", BEST, *extended)
    old, new = load(BEST), load("runs/second/checkpoints/last.ckpt")
    assert new.vocabulary.words[:6] == old.vocabulary.words and len(new.vocabulary) > len(old.vocabulary)
    after = dict(new.model.named_parameters())
    for name, weight in old.model.named_parameters():
        assert torch.equal(after[name][: len(weight)], weight), name
    to_words = after["decoder.output.L_o.weight"]
    assert all(torch.equal(row, to_words[UNK]) for row in to_words[10:])
    Path(BEST).unlink()  # what was extended is in the second model
    for name in ("test", "validate"):
        command(name, "--ckpt_path", "runs/second/checkpoints/last.ckpt")
    assert metrics_of("runs/second", "test") and metrics_of("runs/second", "val")


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    unset = ("WANDB", "CAPTIONING_RUN_FOLDER")
    names = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    with Path("log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "captioning", *words],
            env=names | {"PYTHONPATH": str(ROOT)} | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, Path("log").read_text()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_to_all_processes_of_a_run_ends_it_after_its_step(workdir, number, code):
    """As ``timeout``, systemd, schedulers and terminals send it: the processes that load images get it, too."""
    config = tiny_config(workdir / "shapes")
    del config["trainer"]["logger"]  # wandb offline, which says at its end how to upload
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    words = ["fit", "--config", "tiny.yaml", "--trainer.max_epochs", "1000", "--data.num_workers", "2"]
    run = start(*words, NETRC=str(workdir / "no-netrc"), HOME=str(workdir))
    wait_until(lambda: "epoch 2," in Path("log").read_text(), run)
    os.killpg(run.pid, number)
    assert run.wait(timeout=60) == code, Path("log").read_text()
    log = Path("log").read_text()
    assert "Traceback" not in log and "was raised with message" not in log
    assert log.splitlines()[-1] == "to go on: captioning fit --ckpt_path runs/tiny/checkpoints/last.ckpt"
    assert step_of(LAST) >= 4


@pytest.mark.slow
def test_a_run_logs_to_wandb_offline_without_an_account_or_a_question(workdir):
    config = tiny_config(workdir / "shapes")
    del config["trainer"]["logger"], config["trainer"]["callbacks"]
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    run = start("fit", "--config", "tiny.yaml", "--name", "my run", NETRC=str(workdir / "no-netrc"), HOME=str(workdir))
    assert run.wait(timeout=150) == 0, Path("log").read_text()
    (folder,) = Path("runs/my run/wandb").glob("offline-run-*")
    assert list(folder.glob("files/media/images/val/figures_*.png"))
    assert "wandb sync 'runs/my run'/wandb/offline-run-*" in Path("log").read_text()


@pytest.mark.slow
def test_a_run_in_wandb_has_the_users_name_and_not_that_of_a_copied_config(workdir):
    def name_and_id(*words: str) -> tuple[str, str]:
        arguments = Fit(["--config", *words, "--name", "tiny"]).config.trainer.logger[0]["init_args"]
        return arguments["name"], arguments["id"]

    options = ["--trainer.logger.name", "mine", "--trainer.logger.init_args.id=x1"]
    assert name_and_id("tiny.yaml", "--trainer.logger", "WandbLogger", *options) == ("mine", "x1")
    config = tiny_config(workdir / "shapes")
    config["trainer"]["logger"] = [{"class_path": "WandbLogger", "init_args": {"name": "other", "id": "x0"}}]
    Path("other.yaml").write_text(yaml.safe_dump(config))  # as fit leaves it in a run's folder
    name, run_id = name_and_id("other.yaml")
    assert name == "tiny-2" and run_id != "x0"  # the first has taken its name


@pytest.mark.parametrize(
    ("restarts", "saves", "requeued"), [("0", False, True), ("7", True, True), ("7", False, False)]
)
def test_a_slurm_job_that_saves_nothing_is_requeued_a_few_times(tmp_path, restarts, saves, requeued):
    last = tmp_path / "runs/mine/checkpoints/last.ckpt"
    last.parent.mkdir(parents=True)
    last.touch()
    os.utime(last, (1, 1))
    commands = {"srun": f"{f'sleep 0.05; touch {last};' * saves} exit 143", "scontrol": 'echo "$@" > requeued'}
    for name, code in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": restarts, "LAUNCH": "srun"}
    ended = subprocess.run(
        ["bash", str(ROOT / "scripts/slurm_fit.sh"), "mine"],
        cwd=tmp_path,
        env=environment | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=False,
    )
    assert ended.returncode == 143 and (tmp_path / "requeued").exists() == requeued


def test_a_run_prints_no_advice_of_libraries_and_the_metrics_of_each_epoch(workdir, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_SILENT", "false")
    options = ["--trainer.enable_progress_bar", "true", "--trainer.logger", "WandbLogger", "--trainer.max_epochs", "2"]
    command("fit", "--config", "tiny.yaml", *options, "--checkpoint.monitor", "val/cider_d")
    out, err = capsys.readouterr()
    output = out + err
    for words in ("already configured", "TPU", "to estimate", "Tip"):
        assert words not in output
    assert re.search(r"^decoder: AttentionDecoder, ([\d,]+) parameters, \1 of them trained$", output, re.MULTILINE)
    with next(Path("runs/tiny").rglob("metrics.csv")).open() as file:
        logged = [f"val/nll {float(row['val/nll']):.2f} " for row in csv.DictReader(file) if row["val/nll"]]
    pattern = r"^epoch (.), step .+: train/loss .+ (val/nll \S+ )val/cider_d \S+ val/bleu4"
    lines = re.findall(pattern, output, re.MULTILINE)
    assert lines == [("1", logged[0]), ("2", logged[1])]


# validate, test and predict


def test_checkpoint_and_exported_folder_have_equal_metrics_on_data_of_the_run_or_a_config(trained, capsys):
    command("test", "--ckpt_path", BEST, *EXACT)
    own = metrics_of("runs/tiny")
    shutil.copy(BEST, "loose.ckpt")
    files = {path: path.read_bytes() for path in Path("exported").iterdir()}
    for model, name in (("loose.ckpt", "loose"), ("exported/", "exported")):
        command("test", "--ckpt_path", model, "--config", "tiny.yaml", *EXACT)
        other = metrics_of(f"runs/scored/{name}/tiny")
        assert {key: other[key] for key in other if key.startswith("test/")} == {
            key: own[key] for key in own if key.startswith("test/")
        }
    assert {path: path.read_bytes() for path in Path("exported").iterdir()} == files
    written = captions_of("runs/tiny")  # which names each image's file
    texts = [caption.text for caption in load("exported")([entry["file"] for entry in written], beam_size=1)]
    assert texts == [entry["caption"] for entry in written]
    references = json.loads(Path(shapes_folder(), "annotations/captions_test.json").read_text())["annotations"]
    of_second = [entry["caption"] for entry in references if entry["image_id"] == written[1]["image_id"]]
    assert written[1]["references"] == of_second
    with pytest.raises(InputError, match=r"exported: is in no run's folder; name a configuration with its data"):
        command("test", "--ckpt_path", "exported")


def test_a_test_takes_other_data_and_options_than_the_runs(trained):
    config = yaml.safe_load(Path("tiny.yaml").read_text())
    config["data"]["limit_images"] = 1
    Path("other.yaml").write_text(yaml.safe_dump({"data": config["data"]}))
    command("test", "--ckpt_path", BEST, "--config", "other.yaml", "--model.search.beam_size", "2")
    assert metrics_of("runs/tiny/other")["conditions"]["beam_size"] == 2 and len(captions_of("runs/tiny/other")) == 1
    assert not Path("runs/tiny/test_metrics.json").exists()
    Path("seed.yaml").write_text("seed_everything: 7\n")
    command("test", "--ckpt_path", BEST, "--config", "seed.yaml", "other.yaml", "--results", "seeded")
    assert metrics_of("seeded")["provenance"]["seed"] == 7  # though the last file says nothing of it
    command("test", "--ckpt_path", BEST, "--data.limit_images", "1", "--results", "here")
    assert metrics_of("here")["conditions"]["beam_size"] == 1 and len(captions_of("here")) == 1


def test_test_images_of_the_coco_server_are_captioned_and_not_scored(trained):
    shapes = shapes_folder()
    shutil.copytree(shapes / "test", "server/test2014")
    images = json.loads((shapes / "annotations/captions_test.json").read_text())["images"]
    Path("server/annotations").mkdir()
    Path("server/annotations/image_info_test2014.json").write_text(json.dumps({"images": images}))
    for split in ("train", "val"):
        Path(f"server/annotations/captions_{split}2014.json").touch()
    arguments = {"root": "server", "year": 2014, "test_captions": "annotations/image_info_test2014.json"}
    source = {"class_path": "captioning.data.CocoSource", "init_args": arguments}
    Path("server.yaml").write_text(yaml.safe_dump({"data": {"source": source}}))
    command("predict", "--ckpt_path", BEST, "--config", "server.yaml", "--results", "out")
    results = json.loads(Path("out/predict_results.json").read_text())
    assert [entry["image_id"] for entry in results] == [image["id"] for image in images] and results[0]["caption"]
    lines = [json.loads(line) for line in Path("out/predictions.jsonl").read_text().splitlines()]
    assert {line["image_id"]: line["caption"] for line in lines} == {e["image_id"]: e["caption"] for e in results}
    assert all(Path(line["image"]).is_file() for line in lines)
    with pytest.raises(
        InputError, match=r"image_info_test2014\.json: has no captions to compare with; use captioning pre"
    ):
        command("test", "--ckpt_path", BEST, "--config", "server.yaml")


def test_settings_in_a_checkpoint_import_no_class(trained):
    content = torch.load(BEST, weights_only=True)
    settings = content["captioning"]["settings"]
    for place in ("optimizer", "search", "scheduler"):
        settings["model"][place] = {"class_path": "payload.X"}
    settings["data"]["source"] = {"class_path": "payload.X"}
    Path("payload.py").write_text("raise SystemExit('run')\n")
    torch.save(content, "loose.ckpt")
    command("test", "--ckpt_path", "loose.ckpt", "--config", "tiny.yaml")
    assert "payload" not in sys.modules


# What users get wrong


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit", "--config", "tiny.yaml", "--data.source", "payload.Source"], "name its module by --import"),
        (["fit", "--config", "tiny.yaml", "--checkpoint.monitor", "val/meteor"], "no validation logs that"),
        (["fit", "--config", "tiny.yaml", "--trainer.strategy", "ddq"], "invalid strategy name"),
        (["fit", "--config", "tiny.yaml", "--trainer.fast_dev_run", "-3"], "fast_dev_run"),
        (["fit", "--config", "tiny.yaml", "--data.source.init_args.train", "0"], "train must be"),
        (["fit", "--config", "tiny.yaml", "--data.vocabulary.file", "gone.json"], r"gone\.json: "),
        (["fit", "--config", "tiny.yaml", "--ckpt_path", "tiny.yaml"], r"tiny\.yaml: .*not a checkpoint"),
        (["fit", "--config", "tiny.yaml", "--init_from", "none.ckpt"], r"none\.ckpt: "),
        (
            ["fit", "--config", "tiny.yaml", "--init_from", BEST, "--data.vocabulary.max_words", "5"],
            r"its vocabulary .* is not the data's \(5\)",
        ),
        (
            ["fit", "--config", "tiny.yaml", "--init_from", BEST, "--model.decoder.init_args.hidden_dim", "9"],
            "its weights do not fit the model of the config",
        ),
        (["test", "--ckpt_path", "tiny.yaml"], r"tiny\.yaml: .*not a checkpoint"),
        (["test", "--ckpt_path", BEST, "--context_mode", "sample"], "sample"),
        (["test", "--ckpt_path", BEST, "--data.test_split", "val"], r"mean captioning test --split\?"),
        (["test", "--ckpt_path", BEST, "--model.search.beam_size", "0"], "beam_size"),
        (["test", "--ckpt_path", BEST, "--seed_everything", "-1"], "seed_everything must be in 0"),
    ],
)
def test_a_mistake_is_one_line(trained, words, message):
    with pytest.raises(InputError, match=message):
        command(*words)


def test_every_dotted_option_that_the_code_names_exists(capsys):
    with pytest.raises(SystemExit):
        fit(["--help"])
    options = set(re.findall(r"--[\w.]+", capsys.readouterr().out))
    files = (ROOT / "captioning").rglob("*.py")
    texts = [
        node.value
        for path in files
        if path.stem != "earlier_names"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    named = set(re.findall(r"--[a-z_]+(?:\.[a-z_]+)+", " ".join(texts)))
    of_a_class = {option for option in named if f"{option.rpartition('.')[0]}.help" in options}
    assert len(named) > 20 and named <= options | of_a_class


def test_settings_that_say_where_a_run_is_stored_are_options_of_fit(capsys):
    with pytest.raises(SystemExit):
        fit(["--help"])
    options = set(re.findall(r"--([\w.]+)", capsys.readouterr().out))
    assert {*STORAGE_SETTINGS} <= options


def test_missing_data_are_named_before_the_model_is_built(workdir):
    vgg = ["--model.encoder", "captioning.encoders.TorchvisionEncoder", "--model.encoder.name", "vgg19"]
    coco = ["--data.source", "captioning.data.CocoSource", "--data.source.root", "nowhere"]
    with pytest.raises(InputError, match=r"captions_train2017\.json: missing; run captioning prepare coco"):
        command("fit", "--config", "tiny.yaml", *vgg, "--model.encoder.node", "features.35", *coco)
