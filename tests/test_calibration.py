"""The confidence of captions, and doubt about images unlike the training data."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers import random_view, save_image
from helpers_runs import WORDS, save_checkpoint, tiny_config
from helpers_training import make_data, make_module, make_shapes, make_trainer
from PIL import Image
from pytorch_lightning.callbacks import LambdaCallback

from captioning.checkpoint.average import average_checkpoints
from captioning.checkpoint.calibration import (
    Calibration,
    fit,
    fit_views,
    is_supported,
    isotonic,
    reliability,
    view_statistics,
)
from captioning.checkpoint.format import calibration_of
from captioning.cli import calibrate as calibrating
from captioning.cli.caption import main as caption_images
from captioning.cli.export import main as export
from captioning.cli.fit import main as fit_model
from captioning.data.shapes import ShapesSource
from captioning.errors import InputError
from captioning.inference import load
from captioning.training.datamodule import CaptionDataModule

# The map from log-probabilities


def test_the_map_is_the_weighted_isotonic_regression_of_its_bins():
    """By the max-min formula: the value of a bin is the largest of the least means of the bins around it."""
    draw = np.random.default_rng(0)
    values = draw.normal(size=1000)
    outcomes = draw.random(1000) < 0.5 + 0.3 * np.sin(3 * values)  # rises and falls
    bins = np.array_split(np.argsort(values, kind="stable"), 25)
    counts = np.array([len(rows) + 1 for rows in bins])
    positives = np.array([outcomes[rows].sum() + 0.5 for rows in bins])
    expected = [
        max(min(positives[a : b + 1].sum() / counts[a : b + 1].sum() for b in range(i, 25)) for a in range(i + 1))
        for i in range(25)
    ]
    knots, probabilities = isotonic(values, outcomes)
    assert (np.diff(knots) > 0).all()
    np.testing.assert_allclose(probabilities, np.unique(np.round(expected, 12)))


def test_confidences_are_calibrated_on_words_that_they_were_not_fitted_to():
    draw = np.random.default_rng(1)
    log_probs = np.log(draw.uniform(0.02, 1, size=(600, 8)))
    truth = np.exp(log_probs) ** 0.5 * 0.9  # the model is too modest
    supported = draw.random(truth.shape) < truth
    calibration = fit("numbers", None, log_probs[::2].tolist(), supported[::2].tolist())
    held_out = log_probs[1::2].ravel(), supported[1::2].ravel().astype(float)
    error, curve = reliability(np.array(calibration.confidences(held_out[0])), held_out[1])
    uncalibrated, _ = reliability(np.exp(held_out[0]), held_out[1])
    assert error < 0.03 < 0.1 < uncalibrated
    assert sum(item["count"] for item in curve) == len(held_out[0])
    assert calibration.confidences([-0.1])[0] > calibration.confidences([-2.0])[0]


def test_the_calibration_error_of_a_curve_computed_by_hand():
    error, curve = reliability(np.array([0.05, 0.05, 0.95, 1.0]), np.array([0, 1, 1, 1.0]))
    assert curve == [
        {"predicted": 0.05, "observed": 0.5, "count": 2},
        {"predicted": 0.975, "observed": 1.0, "count": 2},
    ]
    assert error == pytest.approx((0.45 * 2 + 0.025 * 2) / 4)


def test_a_word_is_supported_by_any_reference():
    references = ["a dog runs".split(), "the brown dog".split()]
    assert is_supported("a brown cat runs".split(), references) == [True, True, False, True]


# Images


def test_statistics_of_a_view_computed_by_hand():
    view = Image.new("RGB", (2, 3), (255, 51, 0))
    view.putpixel((0, 0), (0, 51, 255))
    red, green, blue, *deviations, saturation, its_deviation, texture = view_statistics(view)
    assert (red, green, blue) == pytest.approx((5 / 6, 0.2, 1 / 6))
    assert deviations == pytest.approx([np.sqrt(5) / 6, 0, np.sqrt(5) / 6])
    assert (saturation, its_deviation) == pytest.approx((1, 0))
    across, down = 2 / 9, 2 / 12  # one neighbour differs by 1 in two channels, of 3 pairs and of 4 pairs
    assert texture == pytest.approx(np.log(across + down + 1e-3))


def calibrated(**changes) -> Calibration:
    views = [view_statistics(random_view(12, 12, seed=seed)) for seed in range(200)]
    draw = np.random.default_rng(0)
    log_probs = draw.uniform(-3, 0, size=(200, 4))
    fitted = fit("the random pixels", fit_views(views), log_probs.tolist(), (log_probs > -1.5).tolist())
    return dataclasses.replace(fitted, **changes)


def test_few_images_like_the_fitted_ones_are_unlike_and_all_others_are():
    calibration = calibrated()
    fresh = [calibration.is_unlike(view_statistics(random_view(12, 12, seed=seed)), None) for seed in range(1000, 1400)]
    assert 0 < np.mean(fresh) < 0.06
    plain = Image.new("RGB", (12, 12), (120, 130, 140))
    assert calibration.is_unlike(view_statistics(plain), None)
    like = view_statistics(random_view(12, 12, seed=1000 + fresh.index(False)))
    assert not calibration.is_unlike(like, -0.5)
    assert calibration.is_unlike(like, calibration.least_log_prob - 0.01)


def test_the_limit_is_that_of_the_distances_of_each_image_from_the_others():
    statistics = np.random.default_rng(2).normal(size=(40, 9))
    distances = []
    for row, others in ((row, np.delete(statistics, row, axis=0)) for row in range(40)):
        difference = statistics[row] - others.mean(axis=0)
        distances.append(difference @ np.linalg.inv(np.cov(others.T)) @ difference)
    assert fit_views(list(statistics)).limit == pytest.approx(np.percentile(distances, 99.5), rel=0.1)  # of the ridge


def test_about_one_percent_of_images_like_the_fitted_ones_are_unlike_by_their_view_or_their_words():
    draw = np.random.default_rng(3)
    views, means = draw.normal(size=(2000, 9)), draw.normal(-1, 0.2, size=(2000, 1))
    fitted = fit("numbers", fit_views(list(views[:300])), means[:300].tolist(), [[True]] * 300)
    assert fitted.views is not None
    difference = views[300:] - np.asarray(fitted.views.mean)
    distances = np.einsum("if,fg,ig->i", difference, fitted.views.precision, difference)
    unlike = (distances > fitted.views.limit) | (means[300:, 0] < fitted.least_log_prob)
    assert 0.005 < unlike.mean() < 0.02


# With a model


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return save_checkpoint(tmp_path / "best.ckpt", calibration=calibrated().to_dict())


def test_captions_of_a_calibrated_checkpoint_have_confidences(checkpoint, tmp_path):
    captioner = load(checkpoint)
    caption = captioner.caption(random_view(16, 16))
    for one in (caption, *caption.alternatives):
        assert one.confidences == captioner.calibration.confidences(one.log_probs[: len(one.words)])
        assert one.confidence == pytest.approx(np.mean(one.confidences))
    content = json.loads(json.dumps(caption.to_dict()))
    assert content["confidence"] == caption.confidence and len(content["confidences"]) == len(caption.words)
    assert captioner.caption(Image.new("RGB", (16, 16))).unlike == "the random pixels"


def test_an_export_keeps_the_calibration_and_a_mean_of_weights_loses_it(checkpoint, tmp_path):
    load(checkpoint).export(tmp_path / "exported")
    assert load(tmp_path / "exported").calibration == calibrated()
    assert "calibration" not in average_checkpoints([checkpoint, checkpoint])["captioning"]
    assert load([checkpoint, checkpoint]).calibration is None


def test_an_uncalibrated_model_has_no_confidence_and_no_doubt(tmp_path):
    caption = load(save_checkpoint(tmp_path / "best.ckpt")).caption(random_view(16, 16))
    assert caption.confidence is caption.confidences is caption.unlike is None


def test_improbable_words_are_no_doubt_where_the_caller_asked_for_them(tmp_path):
    values = calibrated(least_log_prob=0.0, views=None).to_dict()  # every caption is improbable
    captioner = load(save_checkpoint(tmp_path / "best.ckpt", calibration=values))
    view = random_view(16, 16)
    assert captioner.caption(view).unlike and captioner.caption(view, method="greedy").unlike
    for options in ({"method": "sample"}, {"prefix": WORDS[0]}, {"no_repeat_ngram": 1}, {"diverse": 2}):
        assert captioner.caption(view, **options).unlike is None


VIEWS = {"mean": [0.0] * 9, "precision": [[0.0] * 9] * 9, "limit": 1.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"views": VIEWS | {"limit": "far"}},
        {"views": VIEWS | {"mean": [0.0]}},
        {"views": {}},
        {"least_log_prob": float("nan")},
        {"supported": [2.0]},
        {"log_probs": []},
        {"nonsense": 1},
        {"data": 3},
    ],
)
def test_a_damaged_calibration_is_refused_with_the_name_of_its_file(tmp_path, changes):
    path = save_checkpoint(tmp_path / "best.ckpt", calibration=calibrated().to_dict() | changes)
    with pytest.raises(InputError, match=r"best\.ckpt: calibration: "):
        load(path)


# From the command line


def test_no_image_is_judged_by_a_calibration_that_was_fitted_to_it(tmp_path, monkeypatch):
    arguments = {"root": str(tmp_path / "shapes"), "train": 1, "val": 5, "test": 1, "image_size": 48}
    source = {"class_path": "captioning.data.shapes.ShapesSource", "init_args": arguments}
    monkeypatch.setattr(calibrating, "_fitted", lambda data, images: images)
    monkeypatch.setattr(calibrating, "_report", lambda judged: {"judged": judged})
    captioner = load(save_checkpoint(tmp_path / "best.ckpt", settings={"data": {"source": source}}))
    fitted, report = calibrating.calibrate(captioner)
    assert [(len(images), len(judged)) for images, judged in report["judged"]] == [(2, 3), (3, 2)]
    for images, judged in report["judged"]:
        assert not {id(image) for image in images} & {id(image) for image in judged}
        assert {id(image) for image in (*images, *judged)} == {id(image) for image in fitted}


def test_export_calibrates_on_all_validation_images_and_judges_each_half_by_the_other(tmp_path, monkeypatch, capsys):
    arguments = {"root": str(tmp_path / "shapes"), "train": 1, "val": 60, "test": 1, "image_size": 48}
    splits, index = [], ShapesSource.index
    monkeypatch.setattr(ShapesSource, "index", lambda self, split: splits.append(split) or index(self, split))
    source = {"class_path": "captioning.data.shapes.ShapesSource", "init_args": arguments}
    checkpoint = save_checkpoint(tmp_path / "best.ckpt", settings={"data": {"source": source}})
    export(["--model", str(checkpoint), "--output", str(tmp_path / "exported"), "--calibrate"])
    assert splits == ["val"]
    assert "calibrated on 60 validation images" in capsys.readouterr().out
    report = json.loads((tmp_path / "exported/calibration.json").read_text())
    assert report["images"] == 60 and report["split"] == "val"
    assert sum(item["count"] for item in report["captions"]) == 60
    assert 0 <= report["values"]["word_calibration_error"] <= 1 and report["commit"]

    photo = save_image(tmp_path / "photo.png", size=(48, 48))
    caption_images([str(photo), "--model", str(tmp_path / "exported"), "--confidence"])
    out, err = capsys.readouterr()
    words, confidence = out.rstrip("\n").split("\t")
    assert set(words.split()) <= set(WORDS) and 0 <= float(confidence) <= 1
    assert err == (
        f"warning: {photo}: this image is unlike the generated shapes that this model was trained on; "
        "do not trust the caption\n"
    )
    shape = next((tmp_path / "shapes").rglob("val/**/*.png"))
    caption_images([str(shape), "--model", str(tmp_path / "exported")])
    assert capsys.readouterr().err == ""

    export(["--model", str(checkpoint), "--output", str(tmp_path / "exported")])
    assert not (tmp_path / "exported/calibration.json").exists()


def test_confidence_needs_a_calibrated_model(tmp_path, capsys):
    photo, checkpoint = save_image(tmp_path / "photo.png"), save_checkpoint(tmp_path / "best.ckpt")
    with pytest.raises(SystemExit) as ended:
        caption_images([str(photo), "--model", str(checkpoint), "--confidence"])
    assert ended.value.code == 2
    assert f"error: --confidence: {checkpoint} is not calibrated; see captioning export\n" == capsys.readouterr().err


def test_calibrating_needs_the_data_settings_of_training(tmp_path, capsys):
    checkpoint = save_checkpoint(tmp_path / "best.ckpt")
    with pytest.raises(SystemExit) as ended:
        export(["--model", str(checkpoint), "--output", str(tmp_path / "exported"), "--calibrate"])
    assert ended.value.code == 2 and "--calibrate: the checkpoint names no data" in capsys.readouterr().err
    assert not (tmp_path / "exported").exists()


# From training


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> ShapesSource:
    return make_shapes(tmp_path_factory.mktemp("calibration"), train=4, val=60, test=60)


def fitted_run(source: ShapesSource, folder: Path, *, resume: Path | None = None, **options) -> dict:
    """Train an epoch, save FOLDER/last.ckpt, and return its entry of the model."""
    module = make_module()
    module.connect(make_data(source, eval_batch_size=30))
    trainer = make_trainer(folder, **{"limit_val_batches": 1.0} | options)
    trainer.fit(module, module.data, ckpt_path=resume, weights_only=None if resume is None else True)
    trainer.save_checkpoint(folder / "last.ckpt")
    return torch.load(folder / "last.ckpt", weights_only=True)["captioning"]


def test_training_calibrates_with_every_validation_and_looks_at_the_images_once(shapes, tmp_path, monkeypatch):
    looked_at: list[int] = []
    photo = CaptionDataModule.photo
    monkeypatch.setattr(CaptionDataModule, "photo", lambda data, row: looked_at.append(row) or photo(data, row))
    entries = [calibration_of(fitted_run(shapes, tmp_path / str(epochs), max_epochs=epochs)) for epochs in (1, 3)]
    assert looked_at == 2 * list(range(60))
    first, last = entries
    assert first.data == "the generated shapes" and first.views == last.views and first.log_probs != last.log_probs
    index = shapes.index("val")
    pixels = [view_statistics(Image.open(index.image_path(row)).convert("RGB")) for row in range(60)]
    np.testing.assert_allclose(first.views.mean, np.mean(pixels, axis=0), atol=1e-6)


def test_a_resumed_run_keeps_the_calibration_until_it_validates(shapes, tmp_path):
    before = fitted_run(shapes, tmp_path / "first")
    resumed = {"resume": tmp_path / "first/last.ckpt", "max_epochs": 2}
    assert fitted_run(shapes, tmp_path / "no", **resumed, limit_val_batches=0)["calibration"] == before["calibration"]
    again = fitted_run(shapes, tmp_path / "again", **resumed)["calibration"]
    assert again["log_probs"] != before["calibration"]["log_probs"] and again["views"] == before["calibration"]["views"]


@pytest.mark.parametrize("options", [{"limit_val_batches": 0}, {"limit_val_batches": 0, "num_sanity_val_steps": 2}])
def test_a_run_that_has_not_validated_is_not_calibrated(shapes, tmp_path, options):
    assert "calibration" not in fitted_run(shapes, tmp_path, **options)


def test_trying_one_batch_or_the_sanity_check_calibrates_nothing(shapes, tmp_path):
    module = make_module()
    module.connect(make_data(shapes, eval_batch_size=30))
    make_trainer(tmp_path, fast_dev_run=True).fit(module, module.data)
    assert module.calibration is None
    seen: list[Any] = []
    watch = LambdaCallback(on_train_start=lambda trainer, module: seen.append(module.calibration))
    make_trainer(tmp_path, num_sanity_val_steps=-1, callbacks=[watch]).fit(module, module.data)
    assert seen == [None]


def test_without_image_files_the_words_alone_are_calibrated(shapes, tmp_path, monkeypatch):
    """As in training from cached features."""
    monkeypatch.setattr(CaptionDataModule, "photo", lambda data, row: None)
    calibration = calibration_of(fitted_run(shapes, tmp_path))
    assert calibration.views is None and len(calibration.log_probs) > 1
    assert load(tmp_path / "last.ckpt").caption(random_view(48, 48)).confidence is not None


def test_a_few_validation_images_are_too_few(tmp_path):
    assert "calibration" not in fitted_run(make_shapes(tmp_path, train=4, val=2, test=1), tmp_path)


def test_a_trained_model_warns_of_a_photograph_and_hardly_of_images_like_its_own(tmp_path, monkeypatch, capsys):
    config = tiny_config(tmp_path / "shapes", train=40, val=100, test=60)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["captioning"])
    fit_model(["fit", "--config", "tiny.yaml"])
    photo = save_image(tmp_path / "photo.jpg", size=(80, 60))
    like = sorted(map(str, (tmp_path / "shapes/test").glob("*.png")))
    for name in ("best", "last"):
        capsys.readouterr()
        checkpoint = f"runs/tiny/checkpoints/{name}.ckpt"
        caption_images(["--model", checkpoint, str(photo), *like, "--confidence"])
        out, err = capsys.readouterr()
        assert len(out.splitlines()) == 61
        first, *others = err.splitlines()
        assert first == (
            f"warning: {photo}: this image is unlike the generated shapes that this model was trained on; "
            "do not trust the caption"
        )
        assert len(others) <= 3
