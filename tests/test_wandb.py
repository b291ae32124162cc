"""Offline wandb runs, read back with wandb's own reader."""

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from helpers_runs import tiny_config
from helpers_training import command, enter
from PIL import Image

from captioning.metrics.table import METRICS

pytestmark = pytest.mark.slow

EPOCHS = 2


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


def leet(*args: str) -> str:
    words = [sys.executable, "-m", "wandb", "leet", "inspect", *args]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[dict[str, Run]]:
    """A run of two epochs, the same resumed for a third, its best checkpoint tested, and another of its config."""
    folder = tmp_path_factory.mktemp("wandb")
    config = tiny_config(folder / "shapes", val=3, test=1)
    config["trainer"] |= {"max_epochs": EPOCHS, "logger": None, "callbacks": None}
    with pytest.MonkeyPatch.context() as patch:
        enter(folder, config, patch)
        Path("overlay.yaml").write_text(yaml.safe_dump({"seed_everything": 7}))
        patch.setenv("WANDB_MODE", "offline")
        wandb.teardown()  # of an earlier test's: it would keep that test's environment
        steps = {
            "first": ["fit", "--config", "tiny.yaml", "--config", "overlay.yaml"],
            "resumed": ["fit", "--ckpt_path", "runs/tiny/checkpoints/last.ckpt", "--trainer.max_epochs", "3"],
            "tested": ["test", "--ckpt_path", "runs/tiny/checkpoints/best.ckpt"],
            "again": ["fit", "--config", "runs/tiny/config.yaml", "--name", "again"],
        }
        runs: dict[str, Run] = {}
        for name, words in steps.items():
            command(*words)
            wandb.finish()
            seen = {run.folder for run in runs.values()}
            (new,) = [
                path.resolve() for path in folder.glob("runs/*/wandb/offline-run-*") if path.resolve() not in seen
            ]
            runs[name] = Run(new)
        command("test", "--ckpt_path", "runs/tiny/checkpoints/best.ckpt", "--no_logger")
        shutil.copytree("runs/tiny", "copy", ignore=shutil.ignore_patterns("wandb"))
        command("test", "--ckpt_path", "copy/checkpoints/best.ckpt")
        assert len(list(folder.glob("copy/wandb/offline-run-*"))) == 1
        assert len(list(folder.glob("runs/*/wandb/offline-run-*"))) == 4
        moved = folder.rename(folder.with_name("another machine")).resolve()  # from which it is uploaded
        for run in runs.values():
            run.folder = moved / run.folder.relative_to(folder.resolve())
        yield runs


def test_the_name_is_that_of_the_config_and_runs_are_grouped_by_attention(runs):
    (run,) = runs["first"].of("run")
    assert (run["project"], run["run_group"], run["job_type"]) == ("captioning", "soft", "train")
    assert run["display_name"] == "tiny"


def test_the_columns_of_the_table_of_runs_the_commit_and_all_settings_are_in_the_config(runs):
    config = runs["first"].end["config"]
    columns = [config[name] for name in ("attention", "estimator", "context_mode", "encoder", "seed")]
    assert columns == ["soft", None, "expected", "ConvEncoder", 7] and config["seed_everything"] == 7
    assert config["model"]["decoder"]["init_args"]["hidden_dim"] == 7
    assert {"commit", "command", "machine"} <= set(config["provenance"])


def test_every_validation_is_there_with_the_values_of_the_csv_file(runs):
    with (runs["first"].folder.parent.parent / "metrics/version_0/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["val/nll"]]
    assert len(rows) == EPOCHS
    for key in ("val/nll", "val/bleu1", "val/bleu4", "val/reference_attention_correctness"):
        logged = runs["first"].history(key)
        assert [step for step, _ in logged] == [int(row["step"]) for row in rows]
        assert [value for _, value in logged] == pytest.approx([float(row[key]) for row in rows])


def test_controls_of_metrics_have_keys_of_their_own(runs):
    keys = {key for entry in runs["first"].of("history") for key in entry["item"] if "figures" not in key}
    controls, metrics = (
        {key.partition("/")[2] for key in keys if key.startswith(stage)} for stage in ("val_controls/", "val/")
    )
    assert controls >= {"brevity_penalty", "bleu4_no_penalty", "reference_pointing_chance"}
    assert metrics >= {"bleu4", "nll", "reference_pointing_accuracy"} and len(metrics) <= 15
    assert all(METRICS[name].mode is None for name in controls) and all(METRICS[name].mode for name in metrics)


def test_every_validation_logs_the_same_photos_with_captions_also_in_a_moved_run(runs):
    for run, stage, count in (("first", "val", EPOCHS), ("resumed", "val", 1), ("tested", "test", 1)):
        panel = f"{stage}/figures"
        logged = [item for item in (entry["item"] for entry in runs[run].of("history")) if f"{panel}.count" in item]
        assert len(logged) == count
        for item in logged:
            names = item[f"{panel}.filenames"]
            assert len(names) == len(item[f"{panel}.captions"]) == {"val": 3, "test": 1}[stage]
            sizes = set()  # wandb's panel has one
            for name in names:
                with Image.open(runs[run].folder / "files" / name) as picture:
                    sizes.add(picture.size)
            ((width, height),) = sizes
            assert min(width, height) > 50
    steps = [step for step, _ in runs["first"].history("val/figures.count")]
    assert steps == [step for step, _ in runs["first"].history("val/nll")]  # one slider moves both


def test_the_best_value_of_the_monitored_metric_is_in_the_summary_and_the_last_one_beside_it(runs):
    values = [value for _, value in runs["first"].history("val/bleu4")]
    assert runs["first"].end["summary"]["val/bleu4"] == {"max": max(values), "last": values[-1]}


def test_a_resumed_run_and_its_test_continue_the_run_and_another_of_its_config_does_not(runs):
    ids = {name: run.of("run")[0]["run_id"] for name, run in runs.items()}
    assert ids["first"] == ids["resumed"] == ids["tested"] != ids["again"]
    assert [step for step, _ in runs["resumed"].history("val/nll")][-1] > runs["first"].history("val/nll")[-1][0]
    assert "test/bleu4" in runs["tested"].end["summary"]
    assert runs["again"].of("run")[0]["display_name"] == "again"
