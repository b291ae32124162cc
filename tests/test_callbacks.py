"""The wandb run without a wandb process; tests/test_wandb.py reads whole offline runs back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wandb
from PIL import Image

from captioning.evaluation.records import CaptionedImage
from captioning.run_folder import RunFolder
from captioning.training import WandbRun
from captioning.training.callbacks import BestCheckpoint, StopEarly


class FakeRun:
    """Records what is logged."""

    id, entity, project, name, step, disabled = "abc", "me", "captioning", "tiny", 12, False
    group, job_type, tags = "shapes", "train", ("soft",)

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.artifacts: list[tuple[Any, list[str]]] = []

    def log(self, content: dict[str, Any], step: int | None = None) -> None:
        self.logged.append(content)

    def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
        self.artifacts.append((artifact, aliases))


def make_logger(folder: Path, **options: Any) -> tuple[WandbRun, FakeRun]:
    logger, run = WandbRun(save_dir=folder, **options), FakeRun()
    logger._experiment = run  # type: ignore[assignment]
    return logger, run


def saved(path: Path, *, monitor: str | None, score: float | None = None) -> Any:
    """What a ModelCheckpoint knows after it has written ``path``."""
    path.write_bytes(b"weights")
    value = None if score is None else torch.tensor(score)
    return SimpleNamespace(
        best_model_path=str(path), monitor=monitor, mode="max", best_model_score=value, current_score=value
    )


def test_samples_become_one_table_and_an_image_each(tmp_path):
    overlays = []
    for name in ("a.png", "b.png"):
        Image.new("RGB", (5, 4), "red").save(tmp_path / name)
        overlays.append(tmp_path / name)
    images = [
        CaptionedImage(image_id=31, caption="a dog", log_prob=-1.5, references=["a dog", "two big dogs"]),
        CaptionedImage(image_id=32, caption="cats", log_prob=-2.5, references=["a bird"]),
    ]
    logger, run = make_logger(tmp_path)
    logger.log_samples(images, overlays, epoch=3, step=40)
    assert [sorted(entry) for entry in run.logged] == [
        [key, "trainer/global_step"] if key < "trainer" else ["trainer/global_step", key]
        for key in ("val/sample_1", "val/sample_2", "val/samples")
    ]
    assert {entry["trainer/global_step"] for entry in run.logged} == {40}
    rows = [
        dict(zip(run.logged[2]["val/samples"].columns, row, strict=True)) for row in run.logged[2]["val/samples"].data
    ]
    assert [(row["epoch"], row["image_id"], row["caption"]) for row in rows] == [(3, 31, "a dog"), (3, 32, "cats")]
    assert rows[0]["references"] == "a dog\ntwo big dogs"
    assert rows[0]["bleu1"] == 100 and rows[1]["bleu1"] == 0
    assert [row["log_prob"] for row in rows] == [-1.5, -2.5]


def test_checkpoints_are_logged_once_at_the_end_with_their_aliases(tmp_path):
    logger, run = make_logger(tmp_path, log_model=True)
    best, last = (
        saved(tmp_path / "best.ckpt", monitor="val/bleu4", score=21.5),
        saved(tmp_path / "last.ckpt", monitor=None),
    )
    for _ in range(2):
        logger.after_save_checkpoint(best)
        logger.after_save_checkpoint(last)
    assert not run.artifacts
    logger.finalize("failed")  # an interrupted run has checkpoints too
    logger.finalize("success")
    assert [(artifact.name, aliases) for artifact, aliases in run.artifacts] == [
        ("model-abc", ["best"]),
        ("model-abc", ["last"]),
    ]
    assert [artifact.metadata["score"] for artifact, _ in run.artifacts] == [21.5, None]


def test_every_checkpoint_is_logged_when_all_are_wanted(tmp_path):
    logger, run = make_logger(tmp_path, log_model="all")
    path = tmp_path / "best.ckpt"
    for number in range(3):
        callback = saved(path, monitor="val/bleu4", score=number)
        os.utime(path, (number, number))
        logger.after_save_checkpoint(callback)
    assert [artifact.metadata["score"] for artifact, _ in run.artifacts] == [0, 1, 2]


def test_no_checkpoint_is_logged_unless_it_is_asked_for(tmp_path):
    logger, run = make_logger(tmp_path)
    logger.after_save_checkpoint(saved(tmp_path / "best.ckpt", monitor="val/bleu4", score=1.0))
    logger.finalize("success")
    assert not run.artifacts


def test_checkpoints_may_be_wanted_of_an_offline_run():
    assert WandbRun(log_model=True, offline=True)._log_model is True


def test_where_the_run_is_kept_stands_in_its_folder(tmp_path):
    logger, _ = make_logger(tmp_path)
    logger.after_save_checkpoint(saved(tmp_path / "last.ckpt", monitor=None))
    assert json.loads((tmp_path / "wandb_run.json").read_text()) == {
        "id": "abc",
        "entity": "me",
        "project": "captioning",
        "name": "tiny",
        "group": "shapes",
        "job_type": "train",
        "tags": ["soft"],
        "step": 12,
    }
    again = WandbRun.of_folder(RunFolder(tmp_path))
    assert again is not None
    options = {name: again._wandb_init[name] for name in ("entity", "project", "name", "group", "job_type", "tags")}
    assert options == {
        "entity": "me", "project": "captioning", "name": "tiny", "group": "shapes", "job_type": "train",
        "tags": ["soft"],
    }  # fmt: skip


def test_a_folder_without_a_run_has_none_to_go_on_with(tmp_path):
    assert WandbRun.of_folder(RunFolder(tmp_path)) is None


def test_a_test_is_scores_a_row_per_image_and_an_overlay_each(tmp_path):
    Image.new("RGB", (5, 4), "red").save(tmp_path / "a.png")
    images = [
        CaptionedImage(image_id=31, caption="a dog", log_prob=-1.5, finished=True, references=["a dog", "two dogs"]),
        CaptionedImage(image_id=32, caption="cats", log_prob=-2.5, finished=False, references=["a bird"]),
    ]
    logger, run = make_logger(tmp_path)
    logger.log_test(
        {"test/bleu4": 12.5},
        images,
        [("a dog", tmp_path / "a.png")],
        conditions={"test/beam_size": 3, "test/split": "val"},
        step=40,
    )
    entries = {next(iter(set(entry) - {"trainer/global_step"})): entry for entry in run.logged}
    assert entries.keys() == {"test/sample_1", "test/captions", "test/bleu4"}
    assert {entry["trainer/global_step"] for entry in run.logged} == {40}
    assert entries["test/bleu4"]["test/bleu4"] == 12.5
    assert run.summary == {"test/beam_size": 3, "test/split": "val"}
    table = entries["test/captions"]["test/captions"]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.data]
    assert [(row["image_id"], row["caption"], row["finished"]) for row in rows] == [
        (31, "a dog", True),
        (32, "cats", False),
    ]
    assert rows[0]["references"] == "a dog\ntwo dogs"
    assert rows[0]["bleu1"] == 100 and rows[0]["cider_d"] > 0 and rows[1]["bleu1"] == rows[1]["cider_d"] == 0


def test_wandb_that_fails_costs_no_test(tmp_path, monkeypatch):
    logger, run = make_logger(tmp_path)

    def fail(*args, **options):
        raise wandb.errors.CommError("no such project")

    monkeypatch.setattr(run, "log", fail)
    image = CaptionedImage(image_id=31, caption="a dog", references=["a dog"])
    with pytest.warns(UserWarning, match="the test is not logged .no such project"):
        logger.log_test({"test/bleu4": 1.0}, [image], [], conditions={}, step=1)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": 3, "step": 1}', '{"id": "a"}', None])
def test_a_damaged_note_of_the_run_is_as_good_as_none(tmp_path, text):
    if text is not None:
        (tmp_path / "wandb_run.json").write_text(text)
    assert WandbRun(save_dir=tmp_path)._read() == {}


def test_disabled_wandb_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = WandbRun(save_dir=tmp_path)
    (tmp_path / "config.yaml").write_text("a: 1")
    logger.log_metrics({"val/nll": 1.0}, step=1)
    logger.save_file(tmp_path / "config.yaml", "run_config.yaml")
    logger.finalize("success")
    logger.finish()
    wandb.teardown()  # it remembers the mode, which belongs to this test alone
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


class Validations:
    """A trainer that says what a validation found; nothing is saved."""

    def __init__(self) -> None:
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.strategy = SimpleNamespace(reduce_boolean_decision=bool)


def validate(callback: BestCheckpoint, bleu4: float, nll: float) -> bool:
    """Return whether a checkpoint is saved after a validation with these scores."""
    trainer = Validations()
    current = torch.tensor(bleu4)
    trainer.callback_metrics |= {"val/bleu4": current, "val/nll": torch.tensor(nll)}
    better = callback.check_monitor_top_k(trainer, current)
    if better:  # what Lightning then does
        callback.best_k_models = {"best.ckpt": current}
        callback.kth_best_model_path, callback.best_model_score = "best.ckpt", current
    return better


def test_of_equally_good_checkpoints_the_one_of_the_lowest_nll_is_kept(tmp_path):
    best = BestCheckpoint(tmp_path, monitor="val/bleu4", mode="max")
    assert [validate(best, 0.0, nll) for nll in (4.0, 3.0, 3.5, 2.5)] == [True, True, False, True]
    assert validate(best, 1.0, 5.0)  # BLEU comes first
    assert not validate(best, 1.0, 5.0) and not validate(best, 0.5, 1.0) and not validate(best, float("nan"), 1.0)
    resumed = BestCheckpoint(tmp_path, monitor="val/bleu4", mode="max")
    resumed.load_state_dict(best.state_dict())
    assert not validate(resumed, 1.0, 5.5) and validate(resumed, 1.0, 4.5)


def stops(callback: StopEarly, bleu4: float, nll: float) -> bool:
    """Return whether training ends after a validation with these scores."""
    trainer = SimpleNamespace(
        callback_metrics={"val/bleu4": torch.tensor(bleu4), "val/nll": torch.tensor(nll)},
        strategy=SimpleNamespace(reduce_boolean_decision=lambda stop, all: stop),
        fast_dev_run=False,
        should_stop=False,
        current_epoch=0,
    )
    callback._run_early_stopping_check(trainer)
    return trainer.should_stop


def test_while_bleu_is_zero_training_goes_on_as_long_as_the_nll_falls():
    early = StopEarly("val/bleu4", mode="max", patience=2)
    assert not any(stops(early, 0.0, nll) for nll in (5.0, 4.0, 4.5, 3.0, 2.5, 2.0, 1.5))
    resumed = StopEarly("val/bleu4", mode="max", patience=2)
    resumed.load_state_dict(early.state_dict())
    assert [stops(resumed, 0.0, nll) for nll in (1.6, 1.7)] == [False, True]  # neither is below 1.5
    assert [stops(early, bleu4, 1.0) for bleu4 in (3.0, 2.0, 2.0)] == [False, False, True]  # BLEU comes first
