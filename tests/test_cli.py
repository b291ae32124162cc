"""The command line: what users type, and what it leaves behind."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from captioning.cli.command_line import with_run_config
from captioning.cli.fit import main
from captioning.cli.loggers import wandb_offline_without_account
from helpers_runs import tiny_config

from captioning.cli import evaluate
from captioning.errors import InputError
from captioning.inference import load
from captioning.tokenizers import PennTreebank
from captioning.vocabulary import UNK


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    """An empty folder with one small config, entered."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["captioning"])
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_config(tmp_path / "shapes")))
    return tmp_path


def test_fit_then_test_from_the_checkpoint_alone(workdir, capsys):
    main(["fit", "--config", "tiny.yaml"])
    run = Path("runs/tiny")
    assert (run / "config.yaml").is_file() and (run / "checkpoints/last.ckpt").is_file()
    assert list(run.glob("metrics/*/metrics.csv"))
    printed = capsys.readouterr().out
    assert "run folder: runs/tiny" in printed
    assert re.search(r"^epoch 1, step 2, \d+ s: train/loss [\d.]+ val/nll [\d.]+ val/bleu4", printed, re.MULTILINE)
    main(["test", "--ckpt_path", "runs/tiny/checkpoints/best.ckpt"])
    assert set(json.loads((run / "test_metrics.json").read_text())) >= {"test/bleu1", "test/bleu4", "test/nll"}
    assert f"tokens: {PennTreebank.description}" in capsys.readouterr().out
    main(["validate", "--config", "tiny.yaml"])  # finds the best checkpoint of the config's run
    assert (run / "val_metrics.json").is_file()


def test_best_and_last_of_a_named_run_need_no_config(workdir):
    main(["fit", "--config", "tiny.yaml", "--runs", "trained", "--name", "a"])
    main(["test", "--ckpt_path", "best", "--runs", "trained", "--name", "a"])
    assert Path("trained/a/test_metrics.json").is_file()
    cli = main(["fit", "--ckpt_path", "last", "--runs", "trained", "--name", "a", "--trainer.max_epochs", "2"])
    assert cli.trainer.current_epoch == 2


def test_scores_of_a_checkpoint_of_no_run_are_not_written_into_another_run(workdir, capsys):
    main(["fit", "--config", "tiny.yaml"])
    loose = Path("elsewhere/copy.ckpt")
    loose.parent.mkdir()
    shutil.copy("runs/tiny/checkpoints/best.ckpt", loose)
    with pytest.raises(InputError, match=r"runs/tiny: belongs to another run than .*copy.ckpt; give --results"):
        main(["test", "--config", "tiny.yaml", "--ckpt_path", str(loose)])
    main(["test", "--config", "tiny.yaml", "--ckpt_path", str(loose), "--results", "scores"])
    assert Path("scores/test_metrics.json").is_file() and not Path("runs/tiny/test_metrics.json").exists()
    evaluate.main(["--model", str(loose)])
    assert Path("elsewhere/copy/test_metrics.json").is_file() and not Path("runs/config").exists()


def test_a_run_timed_by_max_time_is_resumed(workdir):
    main(["fit", "--config", "tiny.yaml", "--trainer.max_time", "00:01:00:00"])
    cli = main(["fit", "--ckpt_path", "runs/tiny/checkpoints/last.ckpt", "--trainer.max_epochs", "2"])
    assert cli.trainer.current_epoch == 2


def test_a_config_of_a_run_begins_another_with_loggers_of_its_own(workdir):
    wandb = {"class_path": "pytorch_lightning.loggers.WandbLogger", "init_args": {"offline": True}}
    config = yaml.safe_load(Path("tiny.yaml").read_text())
    config["trainer"]["logger"] = [wandb]
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", "tiny.yaml"])
    cli = main(["fit", "--config", "runs/tiny/config.yaml", "--name", "second"])
    kinds = [type(logger).__name__ for logger in cli.trainer.loggers]
    assert kinds == ["WandbRun", "CSVLogger"] and cli.trainer.loggers[0].name is not None
    assert cli.trainer.loggers[0]._name == "second"


@pytest.mark.parametrize("name", [".", ".."])
def test_a_name_is_that_of_a_folder(workdir, name):
    with pytest.raises(InputError, match="is not a valid name of a folder"):
        main(["fit", "--config", "tiny.yaml", "--name", name])


def test_a_run_of_fewer_steps_than_an_epoch_ends_well(workdir):
    cli = main(["fit", "--config", "tiny.yaml", "--trainer.max_steps", "1"])
    assert cli.trainer.global_step == 1 and Path("runs/tiny/checkpoints/last.ckpt").is_file()


def test_the_last_epoch_is_saved_also_without_a_validation_after_it(workdir):
    main(["fit", "--config", "tiny.yaml", "--trainer.max_epochs", "3", "--trainer.check_val_every_n_epoch", "2"])
    assert torch.load("runs/tiny/checkpoints/last.ckpt", weights_only=True)["global_step"] == 6


def test_a_signal_to_all_processes_of_a_run_ends_it_after_its_step(workdir):
    """As ``timeout``, systemd and schedulers send it: the processes that load images get it, too."""
    words = ["fit", "--config", "tiny.yaml", "--trainer.max_epochs", "1000", "--data.num_workers", "2"]
    with Path("log").open("w") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", "captioning", *words], stdout=log, stderr=log, start_new_session=True
        )
    deadline = time.monotonic() + 120
    while "epoch 2," not in Path("log").read_text():
        assert run.poll() is None and time.monotonic() < deadline, Path("log").read_text()
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGTERM)
    assert run.wait(timeout=60) == 143, Path("log").read_text()
    log = Path("log").read_text()
    assert "Traceback" not in log and "was raised with message" not in log
    assert "to go on: captioning fit --ckpt_path runs/tiny/checkpoints/last.ckpt\n" in log
    assert torch.load("runs/tiny/checkpoints/last.ckpt", weights_only=True)["global_step"] >= 4


@pytest.mark.parametrize("words", [["--runs", "elsewhere"], ["--runs=elsewhere"], []])
def test_a_slurm_job_goes_on_with_its_run_wherever_that_is(workdir, words):
    script = Path(__file__).parent.parent / "scripts/slurm_fit.sh"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(script), *arguments], env=environment | {"LAUNCH": "echo", "PYTHON": "python"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    begun = command("mine", "--config", "tiny.yaml", *words)
    assert begun.stdout.split() == [
        "python",
        "-m",
        "captioning",
        "fit",
        "--name",
        "mine",
        "--config",
        "tiny.yaml",
        *words,
    ]
    last = Path("elsewhere" if words else "runs", "mine/checkpoints/last.ckpt")
    last.parent.mkdir(parents=True)
    last.touch()
    assert command("mine", "--config", "tiny.yaml", *words).stdout.split()[-2:] == ["--ckpt_path", "last"]
    unnamed = command("--config", "tiny.yaml")
    assert (
        unnamed.returncode == 2 and unnamed.stderr == "usage: slurm_fit.sh NAME OPTIONS, as captioning fit takes them\n"
    )


@pytest.mark.parametrize(
    ("restarts", "saves", "requeued"), [("0", False, True), ("7", True, True), ("7", False, False)]
)
def test_a_slurm_job_that_saves_nothing_is_not_requeued_for_ever(tmp_path, restarts, saves, requeued):
    last = tmp_path / "runs/mine/checkpoints/last.ckpt"
    last.parent.mkdir(parents=True)
    last.touch()
    os.utime(last, (1, 1))
    for name, code in {
        "srun": f"{f'sleep 0.05; touch {last};' * saves} exit 143",
        "scontrol": 'echo "$@" > requeued',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": restarts}
    script = Path(__file__).parent.parent / "scripts/slurm_fit.sh"
    ended = subprocess.run(
        ["bash", str(script), "mine"],
        cwd=tmp_path,
        env=environment | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LAUNCH": "srun"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 143 and (tmp_path / "requeued").exists() == requeued
    assert ("not requeued" in ended.stderr) != requeued


def test_second_run_gets_a_folder_of_its_own_and_a_resumed_one_keeps_its_folder(workdir):
    main(["fit", "--config", "tiny.yaml"])
    main(["fit", "--config", "tiny.yaml"])
    assert Path("runs/tiny-2/checkpoints/last.ckpt").is_file()
    cli = main(["fit", "--ckpt_path", "runs/tiny/checkpoints/last.ckpt", "--trainer.max_epochs", "2"])
    assert cli.run_dir == Path("runs/tiny") and cli.trainer.current_epoch == 2
    assert not Path("runs/tiny-3").exists()


@pytest.mark.parametrize(
    ("options", "best"),
    [
        (["--checkpoint.monitor", "val/cider_d"], 4),  # the third is worse; of the two others the NLL decides
        (["--model.search.max_length", "2"], 6),  # two words match no 4-gram: BLEU-4 stays 0, and the NLL decides
    ],
)
def test_last_checkpoint_is_of_the_last_epoch_the_best_of_the_best_one(workdir, options, best):
    main(["fit", "--config", "tiny.yaml", "--trainer.max_epochs", "3", *options])
    steps = {
        name: torch.load(f"runs/tiny/checkpoints/{name}.ckpt", weights_only=True)["global_step"]
        for name in ("best", "last")
    }
    assert steps == {"best": best, "last": 6}


def test_command_line_wins_over_what_the_checkpoint_was_made_with(workdir):
    main(["fit", "--config", "tiny.yaml"])
    cli = main(
        [
            *("validate", "--ckpt_path", "runs/tiny/checkpoints/last.ckpt"),
            *("--model.search.beam_size", "2", "--model.bound_samples", "3"),
        ]
    )
    assert cli.model.search.beam_size == 2 and cli.model.bound_samples == 3


def test_checkpoint_keeps_the_full_config_as_plain_data(workdir):
    main(["fit", "--config", "tiny.yaml", "--data.batch_size", "7"])
    settings = torch.load("runs/tiny/checkpoints/last.ckpt", weights_only=True)["captioning"]["settings"]
    assert settings["data"]["batch_size"] == 7
    assert settings["seed_everything"] == 1 and "seed" not in settings["data"]


def test_seed_decides_the_result(workdir):
    def final(name, seed):
        main(["fit", "--config", "tiny.yaml", "--name", name, "--seed_everything", str(seed)])
        state = torch.load(f"runs/{name}/checkpoints/last.ckpt", weights_only=True)["state_dict"]
        return state["captioner.decoder.output.L_o.weight"]

    assert torch.equal(final("a", 5), final("b", 5))
    assert not torch.equal(final("c", 5), final("d", 6))


def test_missing_checkpoint_is_one_line(workdir):
    with pytest.raises(InputError, match=r"runs/tiny/checkpoints/best.ckpt: no such checkpoint"):
        main(["test", "--config", "tiny.yaml"])


def test_a_run_that_fails_before_its_first_step_leaves_no_folder(workdir):
    logger = {"class_path": "pytorch_lightning.loggers.WandbLogger", "init_args": {"project": "captioning"}}
    config = yaml.safe_load(Path("tiny.yaml").read_text())
    config["trainer"]["logger"] = [logger]
    Path("logged.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", "tiny.yaml"])
    for bad, message in (
        (["--data.source.init_args.train", "0"], "train must be 1 to"),  # while classes are made
        (["--data.vocabulary.file", "gone.json"], r"gone\.json: cannot be read"),  # after the loggers have begun
    ):
        with pytest.raises(InputError, match=message):
            main(["fit", "--config", "logged.yaml", *bad])
        assert [path.name for path in Path("runs").iterdir()] == ["tiny"]


def test_a_failed_start_removes_nothing_that_was_there(workdir):
    notes = Path("runs/tiny/notes.txt")
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    with pytest.raises(InputError, match=r"gone\.json"):
        main(["fit", "--config", "tiny.yaml", "--data.vocabulary.file", "gone.json"])
    assert [str(path) for path in Path("runs").rglob("*")] == ["runs/tiny", str(notes)]


def test_a_checkpoint_of_another_vocabulary_names_a_word_that_differs(workdir):
    main(["fit", "--config", "tiny.yaml"])
    Path("words.json").write_text(json.dumps({"words": ["zebra"]}))
    message = r"vocabulary \(\d+ words\) is not the data's \(1\): .* only there and 'zebra' only here; use the"
    with pytest.raises(InputError, match=message):
        main(["validate", "--config", "tiny.yaml", "--data.vocabulary.file", "words.json"])


def run_cli(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "captioning", *args],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | (env or {}),
        stdin=subprocess.DEVNULL,
    )


def test_help_answers_without_loading_torch():
    code = "import sys; sys.argv = ['captioning', '--help']; import captioning.__main__ as m; m.main()"
    code += "; assert not {'torch', 'pytorch_lightning', 'torchvision'} & set(sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr
    assert "captioning fit --config configs/shapes_soft.yaml" in result.stdout


def test_bad_input_is_one_line_and_exit_code_2(workdir):
    result = run_cli("fit", "--config", "tiny.yaml", "--data.source.init_args.train", "0")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "train must be 1 to" in result.stderr.strip().splitlines()[-1]


def test_missing_data_are_noticed_before_anything_is_built(workdir, monkeypatch):
    def build(*args):
        raise AssertionError("weights would be downloaded")

    monkeypatch.setattr("captioning.encoders.conv.ConvEncoder.__init__", build)
    coco = ["--data.source", "CocoSource", "--data.source.root", "nowhere"]
    with pytest.raises(InputError, match=r"captions_train2017\.json: missing; run captioning prepare coco"):
        main(["fit", "--config", "tiny.yaml", *coco])
    assert not Path("runs/tiny").exists()


def test_options_of_the_trainer_that_contradict_each_other_are_one_line(workdir):
    with pytest.raises(InputError, match="fast_dev_run"):
        main(["fit", "--config", "tiny.yaml", "--trainer.fast_dev_run", "-3"])


def test_unknown_option_is_refused_with_exit_code_2(workdir):
    result = run_cli("fit", "--config", "tiny.yaml", "--model.attention_penaltie", "3")
    assert result.returncode == 2
    assert "attention_penaltie" in result.stderr and "Traceback" not in result.stderr


def test_shapes_run_logs_to_wandb_offline_without_an_account_or_a_question(workdir):
    config = yaml.safe_load(Path("tiny.yaml").read_text())
    config["trainer"]["logger"] = [
        {"class_path": "pytorch_lightning.loggers.WandbLogger", "init_args": {"project": "captioning"}}
    ]
    config["trainer"]["callbacks"] = [{"class_path": "captioning.training.CaptionSamples", "init_args": {"images": 1}}]
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    result = subprocess.run(
        [sys.executable, "-m", "captioning", "fit", "--config", "tiny.yaml"],
        capture_output=True,
        text=True,
        timeout=150,
        env=env | {"NETRC": str(workdir / "no-netrc"), "HOME": str(workdir)},
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr
    runs = list(Path("runs/tiny/wandb").glob("offline-run-*/*.wandb"))
    assert len(runs) == 1
    assert list(runs[0].parent.glob("files/media/images/val/sample_1*.png"))
    assert "wandb sync runs/tiny/wandb/offline-run-*" in result.stdout


def test_wandb_mode_of_the_user_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    wandb_offline_without_account()
    assert os.environ["WANDB_MODE"] == "disabled"
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    wandb_offline_without_account()
    assert "WANDB_MODE" not in os.environ
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    wandb_offline_without_account()
    assert os.environ["WANDB_MODE"] == "offline"


def test_an_evaluation_that_is_named_writes_into_the_folder_of_that_name(workdir):
    main(["fit", "--config", "tiny.yaml"])
    before = {path.name for path in Path("runs/tiny").iterdir()}
    main(["predict", "--ckpt_path", "runs/tiny/checkpoints/best.ckpt", "--name", "again"])
    assert Path("runs/again/predictions.jsonl").is_file()
    assert {path.name for path in Path("runs/tiny").iterdir()} == before


def test_config_of_the_checkpoints_run_is_added_when_none_is_named(workdir):
    checkpoint = workdir / "runs/x/checkpoints/best.ckpt"
    checkpoint.parent.mkdir(parents=True)
    torch.save({}, checkpoint)
    Path("runs/x/config.yaml").write_bytes(Path("tiny.yaml").read_bytes())
    args = ["test", "--ckpt_path", str(checkpoint)]
    command, option, settings, *others = with_run_config(args)
    assert [command, option, *others] == ["test", "--config", *args[1:]]
    assert json.loads(settings)["data"]["batch_size"] == 10
    named = ["test", "--config", "other.yaml", *args[1:]]
    assert with_run_config(named) == named


def weights(checkpoint: str) -> dict[str, torch.Tensor]:
    return torch.load(checkpoint, weights_only=True)["state_dict"]


def test_a_second_stage_begins_with_the_weights_of_the_first_and_resumes_without_it(workdir):
    main(["fit", "--config", "tiny.yaml"])
    first = "runs/tiny/checkpoints/best.ckpt"
    second = {
        "model": {
            "objective": {
                "class_path": "captioning.objective.SelfCriticalTraining",
                "init_args": {"samples": 3, "bleu4": 0.5},
            },
            "optimizer": {"class_path": "torch.optim.SGD"},
        },
        "data": {"group": "image"},
        "checkpoint": {"monitor": "val/cider_d"},
    }
    Path("reward.yaml").write_text(yaml.safe_dump(second))
    stage = ["fit", "--config", "tiny.yaml", "--config", "reward.yaml", "--name", "second"]
    main([*stage, "--init_from", first, "--model.optimizer.init_args.lr", "0"])  # nothing is learned
    before, after = weights(first), weights("runs/second/checkpoints/last.ckpt")
    assert all(torch.equal(after[name], value) for name, value in before.items())
    checkpoint = torch.load("runs/second/checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 2 and "momentum" in checkpoint["optimizer_states"][0]["param_groups"][0]
    assert yaml.safe_load(Path("runs/second/config.yaml").read_text())["init_from"] == first
    with next(Path("runs/second/metrics").glob("*/metrics.csv")).open() as file:
        assert {"train/reward", "train/baseline", "val/nll", "val/cider_d"} <= set(next(csv.reader(file)))
    Path(first).unlink()
    resume = ["--ckpt_path", "runs/second/checkpoints/last.ckpt", "--trainer.max_epochs", "2"]
    main(["fit", *resume])  # from the run's own settings
    kept = yaml.safe_load(Path("runs/second/config.yaml").read_text())
    assert kept["ckpt_path"] is None and kept["init_from"] == first  # for what begins with it
    main(["fit", "--config", "runs/second/config.yaml", *resume, "--trainer.max_epochs", "3"])
    assert torch.load("runs/second/checkpoints/last.ckpt", weights_only=True)["global_step"] == 6
    main(["test", "--ckpt_path", "runs/second/checkpoints/last.ckpt"])
    assert "test/cider_d" in json.loads(Path("runs/second/test_metrics.json").read_text())


def test_a_model_is_fine_tuned_on_captions_with_further_words(workdir):
    main(["fit", "--config", "tiny.yaml", "--data.vocabulary.max_words", "6"])
    first = "runs/tiny/checkpoints/best.ckpt"
    extended = ["--data.vocabulary.extend", first, "--model.optimizer.init_args.lr", "0"]  # nothing is learned
    main(["fit", "--config", "tiny.yaml", "--name", "second", "--init_from", first, *extended])
    old, new = load(first), load("runs/second/checkpoints/last.ckpt")
    assert new.vocabulary.words[:6] == old.vocabulary.words and len(new.vocabulary) > len(old.vocabulary)
    assert len(set(new.vocabulary.words)) == len(new.vocabulary.words)
    after = dict(new.captioner.named_parameters())
    for name, weight in old.captioner.named_parameters():
        assert torch.equal(after[name][: len(weight)], weight), name
    to_words = after["decoder.output.L_o.weight"]
    assert all(torch.equal(row, to_words[UNK]) for row in to_words[10:])
    main(["test", "--ckpt_path", "runs/second/checkpoints/last.ckpt"])  # the same words again


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--init_from", "none.ckpt"], "--init_from none.ckpt: the checkpoint cannot be read .No such file"),
        (["--init_from", "tiny.yaml"], "--init_from tiny.yaml: not a checkpoint of this project"),
        (
            ["--init_from", "first.ckpt", "--data.vocabulary.max_words", "5"],
            "first.ckpt: its vocabulary .* is not the data's .5.",
        ),
        (
            ["--init_from", "first.ckpt", "--model.decoder.init_args.hidden_dim", "9"],
            "first.ckpt: its weights do not fit the model of the config",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(workdir, options, message):
    if not Path("first.ckpt").exists() and "first.ckpt" in options:
        main(["fit", "--config", "tiny.yaml"])
        Path("runs/tiny/checkpoints/best.ckpt").rename("first.ckpt")
    with pytest.raises(InputError, match=message):
        main(["fit", "--config", "tiny.yaml", *options])
