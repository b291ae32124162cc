"""Offline wandb runs, read back with wandb's own reader."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
import yaml
from captioning.cli.fit import main
from helpers_runs import tiny_config
from PIL import Image

pytestmark = pytest.mark.slow

EPOCHS, RESUMED_EPOCHS, IMAGES = 2, 3, 2


class Run:
    """One offline run: its folder and the records of its file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (self.file,) = folder.glob("*.wandb")
        self.records = [json.loads(line) for line in leet("--json", str(self.file)).splitlines()]
        self.end = json.loads(leet("--json", "--summary", str(self.file)))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record[kind] for record in self.records if record["type"] == kind]

    def history(self, key: str) -> list[tuple[int, float]]:
        """(trainer/global_step, value) of every time ``key`` was logged."""
        items = [entry["item"] for entry in self.of("history")]
        return [(item["trainer/global_step"], item[key]) for item in items if key in item]

    def artifacts(self, kind: str) -> list[dict[str, Any]]:
        return [artifact for artifact in self.of("artifact") if artifact["type"] == kind]


def leet(*args: str) -> str:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[dict[str, Run]]:
    """A run of two epochs, the same resumed for a third, its best checkpoint tested, and a fork of it."""
    folder = tmp_path_factory.mktemp("wandb")
    config = tiny_config(folder / "shapes", val=3, test=1) | {"seed_everything": 7}
    logger = {"project": "colours", "group": "shapes", "tags": ["soft", "tiny"], "log_model": True}
    config["trainer"] |= {
        "max_epochs": EPOCHS,
        "logger": [{"class_path": "pytorch_lightning.loggers.WandbLogger", "init_args": logger}],
        "callbacks": [{"class_path": "captioning.training.callbacks.CaptionSamples", "init_args": {"images": IMAGES}}],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["captioning", "fit"])
        patch.setenv("WANDB_MODE", "offline")
        patch.delenv("WANDB_DATA_DIR", raising=False)
        wandb.teardown()  # of an earlier test's: it would keep that test's environment
        Path("tiny.yaml").write_text(yaml.safe_dump(config))
        last = "runs/tiny/checkpoints/last.ckpt"
        main(["fit", "--config", "tiny.yaml"])
        main(["fit", "--ckpt_path", last, "--trainer.max_epochs", str(RESUMED_EPOCHS)])
        main(["test", "--ckpt_path", "runs/tiny/checkpoints/best.ckpt"])
        main(["test", "--ckpt_path", "runs/tiny/checkpoints/best.ckpt", "--trainer.logger", "false"])
        main(["test", "--ckpt_path", "runs/tiny/checkpoints/best.ckpt", "--results", "elsewhere"])
        with pytest.warns(UserWarning, match="The dirpath has changed"):
            main(["fit", "--config", "tiny.yaml", "--name", "fork", "--ckpt_path", last, "--trainer.max_epochs", "3"])
        assert "WANDB_DATA_DIR" not in os.environ
        folders = sorted(Path("runs/tiny/wandb").glob("offline-run-*"), key=lambda path: path.stat().st_ctime)
        folders += Path("runs/fork/wandb").glob("offline-run-*")
        names = ("first", "resumed", "tested", "fork")
        yield {name: Run(folder.resolve()) for name, folder in zip(names, folders, strict=True)}


def run_folder(run: Run) -> Path:
    return run.folder.parent.parent


def test_names_come_from_the_config_and_the_run(runs):
    (run,) = runs["first"].of("run")
    assert (run["project"], run["run_group"], run["job_type"]) == ("colours", "shapes", "train")
    assert run["display_name"] == "tiny" and run["tags"] == ["soft", "tiny"]


def test_attention_seed_commit_and_all_settings_are_in_the_config(runs):
    config = runs["first"].end["config"]
    assert config["attention"] == "SoftAttention" and config["score"] == "AdditiveScore"
    assert config["seed"] == 7 and config["seed_everything"] == 7
    assert config["model"]["decoder"]["init_args"]["hidden_dim"] == 7
    assert {"commit", "command", "machine"} <= set(config["provenance"])


def test_config_file_is_kept_with_the_run_as_a_file_of_its_own(runs):
    copy = runs["first"].folder / "files" / "run_config.yaml"
    assert copy.is_file() and not copy.is_symlink()
    assert yaml.safe_load(copy.read_text())["trainer"]["max_epochs"] == EPOCHS
    assert {"path": "run_config.yaml"} in [file for files in runs["first"].of("files") for file in files["files"]]


def test_every_validation_is_there_with_the_values_of_the_csv_file(runs):
    with (run_folder(runs["first"]) / "metrics/version_0/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["val/nll"]]
    assert len(rows) == EPOCHS
    for key in ("val/nll", "val/bleu1", "val/bleu4", "val/reference_attention_correctness"):
        logged = runs["first"].history(key)
        assert [step for step, _ in logged] == [int(row["step"]) for row in rows]
        assert [value for _, value in logged] == pytest.approx([float(row[key]) for row in rows])


def test_summary_keeps_the_best_value_beside_the_last(runs):
    summary, run = runs["first"].end["summary"], runs["first"]
    for key, best in (("val/nll", min), ("val/bleu1", max)):
        values = [value for _, value in run.history(key)]
        assert summary[key] == pytest.approx({"min" if best is min else "max": best(values), "last": values[-1]})


def test_table_has_a_row_per_image_and_validation(runs):
    tables = [table for run in ("first", "resumed") for _, table in table_rows(runs[run])]
    assert len(tables) == RESUMED_EPOCHS
    for epoch, table in enumerate(tables, 1):
        assert table["columns"] == [
            *("epoch", "image_id", "overlay", "caption", "references", "bleu1", "bleu4", "log_prob")
        ]
        assert len(table["data"]) == IMAGES
        for row in table["data"]:
            cells = dict(zip(table["columns"], row, strict=True))
            assert cells["epoch"] == epoch
            assert len(cells["references"].splitlines()) == 5
            assert 0 <= cells["bleu1"] <= 100 and cells["log_prob"] < 0
            assert cells["overlay"]["_type"] == "image-file"


def table_rows(run: Run) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(artifact, table) of every table that the run staged for upload."""
    found = []
    for artifact in run.artifacts("run_table"):
        contents = {entry["path"]: Path(entry["local_path"]) for entry in artifact["manifest"]["contents"]}
        (table,) = [path for name, path in contents.items() if name.endswith(".table.json")]
        found.append((artifact, json.loads(table.read_text())))
    return found


def test_images_of_the_tables_are_staged_in_the_runs_folder(runs):
    for run in (runs["first"], runs["resumed"], runs["fork"]):
        for artifact, _ in table_rows(run):
            files = {entry["path"]: Path(entry["local_path"]) for entry in artifact["manifest"]["contents"]}
            images = [path for name, path in files.items() if name.endswith(".png")]
            assert len(images) == IMAGES
            for path in images:
                assert path.is_relative_to(run_folder(run))
                with Image.open(path) as image:
                    assert min(image.size) > 100


def test_overlays_are_logged_as_images_of_their_own_at_every_validation(runs):
    run = runs["first"]
    assert len(list((run.folder / "files/media/images/val").glob("sample_*.png"))) == IMAGES * EPOCHS
    history = [entry["item"] for entry in run.of("history")]
    for number in range(1, IMAGES + 1):
        steps = [item["trainer/global_step"] for item in history if f"val/sample_{number}._type" in item]
        assert steps == [2, 4]  # 20 captions in batches of 10


def test_best_and_last_checkpoint_are_versions_of_one_artifact(runs):
    run = runs["first"]
    models = run.artifacts("model")
    assert {model["name"] for model in models} == {f"model-{run.end['run_id']}"}
    found = {}
    for model in models:
        (alias,) = {"best", "last"} & set(model["aliases"])
        (entry,) = model["manifest"]["contents"]
        found[alias] = (entry["path"], Path(entry["local_path"]))
    folder = run_folder(run) / "checkpoints"
    assert found == {"best": ("model.ckpt", folder / "best.ckpt"), "last": ("model.ckpt", folder / "last.ckpt")}


def test_a_resumed_run_goes_on_under_its_id_after_its_last_step(runs):
    first, resumed = runs["first"], runs["resumed"]
    assert resumed.end["run_id"] == first.end["run_id"]
    (record,) = resumed.of("run")
    assert record["resume"] is True
    steps = [[int(entry["step"]["num"]) for entry in run.of("history")] for run in (first, resumed)]
    assert max(steps[0]) < min(steps[1])
    assert [step for step, _ in resumed.history("val/nll")] == [5]
    assert [step for step, _ in first.history("val/nll")] == [1, 3]


def test_a_run_forked_into_another_folder_is_another_run(runs):
    assert runs["fork"].end["run_id"] != runs["first"].end["run_id"]
    (record,) = runs["fork"].of("run")
    assert record["display_name"] == "fork"


def test_a_test_goes_to_the_run_of_its_checkpoint_offline_too(runs):
    tested = runs["tested"]
    assert tested.end["run_id"] == runs["first"].end["run_id"]
    (record,) = tested.of("run")
    assert record["resume"] is True
    names = ("project", "run_group", "job_type", "display_name", "tags")
    (before,) = runs["first"].of("run")
    assert [record[name] for name in names] == [before[name] for name in names]
    steps = [[int(entry["step"]["num"]) for entry in runs[name].of("history")] for name in ("resumed", "tested")]
    assert max(steps[0]) < min(steps[1])
    written = json.loads((run_folder(tested) / "test_metrics.json").read_text())
    step = torch.load(run_folder(tested) / "checkpoints/best.ckpt", weights_only=True)["global_step"]
    for name, value in written.items():
        if name not in ("search", "tokens"):
            assert tested.history(name) == [(step, pytest.approx(value))]
    summary = tested.end["summary"]
    assert (
        summary["test/split"] == "test" and summary["test/beam_size"] == 1 and summary["test/inference"] == "expected"
    )


def test_a_tested_run_has_a_table_of_all_images_and_overlays_of_the_first(runs):
    tested = runs["tested"]
    ((_, table),) = table_rows(tested)
    captions = json.loads((run_folder(tested) / "test_captions.json").read_text())
    assert [row[:2] for row in table["data"]] == [[image["image_id"], image["caption"]] for image in captions]
    (figure,) = (tested.folder / "files/media/images/test").glob("sample_*.png")  # the split has one image
    with Image.open(figure) as image:
        assert min(image.size) > 100


def test_sizes_speed_and_norms_are_logged_and_no_number_is_nan(runs):
    first = runs["first"]
    assert first.end["config"]["splits"]["train"]["images"] == 4
    assert set(first.end["config"]["parameters"]) == {"encoder", "attention", "decoder", "trained"}
    for name in ("gradient_norm", "learning_rate", "words_per_second", "captions_per_second"):
        assert first.history(f"train/{name}")
    for run in runs.values():
        assert "NaN" not in json.dumps([run.end["summary"], run.of("history")])


def test_the_data_are_an_artifact_and_the_checkpoints_name_it(runs):
    first = runs["first"]
    (data,) = first.artifacts("dataset")
    assert data["name"] == "data-ShapesSource"
    splits = first.end["config"]["splits"]
    for artifact in (data, *first.artifacts("model")):
        metadata = json.loads(artifact["metadata"])
        assert (metadata if artifact is data else metadata["data"]) == splits
