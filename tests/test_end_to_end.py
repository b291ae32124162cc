"""From nothing to a scored, captioned, drawn image, through the commands that users run."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from commands import Commands
from helpers import load_script
from helpers_faults import command
from PIL import Image

pytestmark = pytest.mark.xdist_group("demo")  # which is run once, in one process

TINY = {
    "trainer": {
        "max_epochs": 6,
        "check_val_every_n_epoch": 6,
        "accelerator": "cpu",
        "precision": "32-true",
        "logger": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "callbacks": [{"class_path": "captioning.training.callbacks.ValidationFigures", "init_args": {"images": 1}}],
        "enable_progress_bar": False,
    },
    "model": {
        "encoder": {"init_args": {"channels": [6, 8], "strides": [8, 2], "image_size": 48}},
        "decoder": {"init_args": {"embedding_dim": 9, "hidden_dim": 24, "dropout": 0.0}},
        "optimizer": {"init_args": {"lr": 0.02}},
        "scheduler": {"init_args": {"warmup_steps": 2}},
        "search": {"max_length": 8},  # every word is a panel of a figure
    },
    "data": {
        "source": {"init_args": {"train": 6, "val": 2, "test": 2, "image_size": 48}},
        "num_workers": 0,
        "batch_size": 15,
    },
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a finished demo of a tiny model."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_demo()
    return folder


def run_demo(run=command) -> None:
    """Run the demo with its commands in this process, because each of ten processes would import PyTorch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["demo.py"])
        patch.setattr(Commands, "run", lambda self, name, arguments: run(*arguments) or 1.0)
        patch.setattr(Commands, "side_by_side", lambda self, task, items: [task(item) for item in items])
        script = load_script("demo")
        patch.setattr(script, "caption_a_photo", lambda runs: None)  # tests/test_demo.py
        script.main(["--overlay_config", "tiny.yaml"])


@pytest.fixture
def demo(trained, monkeypatch) -> Path:
    """The runs of the demo, which all tests share; its folder is the working directory."""
    monkeypatch.chdir(trained)
    return trained / "runs/demo"


def test_the_demo_trains_scores_captions_and_draws_and_resumes_in_its_folder(demo, capsys):
    summary = json.loads((demo / "summary.json").read_text())
    assert set(summary) == {"soft", "hard"} and (demo / "comparison.html").is_file()
    entry = summary["soft"]
    for key in ("bleu1", "bleu2", "bleu3", "bleu4", "pointing_accuracy"):
        assert 0 <= entry[key] <= 100
    assert entry["seconds"] > 0
    assert Path(entry["checkpoint"]).is_file()
    hard = json.loads((demo / "hard/test_metrics.json").read_text())
    expected = json.loads((demo / "hard/expected/test_metrics.json").read_text())
    assert [of["conditions"]["context_mode"] for of in (hard, expected)] == ["argmax", "expected"]
    assert summary["hard"]["bleu4_expected"] == pytest.approx(expected["test/bleu4"], abs=0.01)
    assert (demo / "soft_hard.png").is_file()
    with Image.open(entry["overlay"]) as figure:
        assert min(figure.size) > 100
    scores = json.loads((demo / "soft/test_metrics.json").read_text())
    assert entry["bleu1"] == pytest.approx(scores["test/bleu1"], abs=0.01)
    assert scores["cells"]["grid_size"] == [3, 3] and scores["cells"]["size"] == [48, 48]

    commands = []
    run_demo(lambda *words: commands.append(words))
    assert [words[:2] for words in commands if words[0] == "fit"] == [("fit", "--ckpt_path")] * 2
    assert "Next:" in capsys.readouterr().out
    again = json.loads((demo / "summary.json").read_text())["soft"]
    assert again["bleu1"] == entry["bleu1"] and again["seconds"] == entry["seconds"]  # nothing was trained again


@pytest.mark.slow
def test_a_checkpoint_is_tested_on_another_split_and_the_metrics_have_their_provenance(demo, capsys):
    options = ["--split", "val", "--model.search.beam_size", 2, "--results", demo / "val"]
    command("test", "--ckpt_path", demo / "soft/checkpoints/best.ckpt", *options)
    assert "val split, 2 images" in (printed := capsys.readouterr().out) and "BLEU-4" in printed
    written = json.loads((demo / "val/test_metrics.json").read_text())
    assert {"test/bleu4", "test/bleu4_no_penalty", "test/nll", "test/brevity_penalty"} <= set(written)
    assert written["provenance"]["seed"] == 1 and written["provenance"]["machine"]["cores"]
