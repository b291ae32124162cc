"""The confidence of captions, and doubt about images unlike the training data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import random_view, save_image
from helpers_runs import WORDS, save_checkpoint
from PIL import Image

from captioning.captioner import load
from captioning.captioner.calibration import Calibration, fit, is_supported, isotonic, reliability, view_statistics
from captioning.checkpoint.average import average_checkpoints
from captioning.cli.caption import main as caption_images
from captioning.cli.export import main as export
from captioning.data.shapes import ShapesSource
from captioning.errors import InputError

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
    views = list(draw.normal(size=(300, 9)))
    calibration = fit("numbers", views, log_probs[::2].tolist(), supported[::2].tolist())
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
    fitted = fit("the random pixels", views, log_probs.tolist(), (log_probs > -1.5).tolist())
    return Calibration(**fitted.to_dict() | changes)


def test_few_images_like_the_fitted_ones_are_unlike_and_all_others_are():
    calibration = calibrated()
    fresh = [calibration.is_unlike(random_view(12, 12, seed=seed), None) for seed in range(1000, 1400)]
    assert 0 < np.mean(fresh) < 0.06
    plain = Image.new("RGB", (12, 12), (120, 130, 140))
    assert calibration.is_unlike(plain, None)
    like = next(random_view(12, 12, seed=1000 + i) for i, unlike in enumerate(fresh) if not unlike)
    assert not calibration.is_unlike(like, -0.5)
    assert calibration.is_unlike(like, calibration.least_log_prob - 0.01)


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
    values = calibrated(least_log_prob=0.0, view_limit=1e9).to_dict()  # every caption is improbable
    captioner = load(save_checkpoint(tmp_path / "best.ckpt", calibration=values))
    view = random_view(16, 16)
    assert captioner.caption(view).unlike and captioner.caption(view, method="greedy").unlike
    for options in ({"method": "sample"}, {"prefix": WORDS[0]}, {"no_repeat_ngram": 1}, {"diverse": 2}):
        assert captioner.caption(view, **options).unlike is None


@pytest.mark.parametrize(
    "changes",
    [
        {"view_limit": "far"},
        {"supported": [2.0]},
        {"log_probs": []},
        {"view_mean": [0.0]},
        {"nonsense": 1},
        {"data": 3},
    ],
)
def test_a_damaged_calibration_is_refused_with_the_name_of_its_file(tmp_path, changes):
    path = save_checkpoint(tmp_path / "best.ckpt", calibration=calibrated().to_dict() | changes)
    with pytest.raises(InputError, match=r"best\.ckpt: calibration: "):
        load(path)


# From the command line


def test_export_calibrates_on_one_half_of_the_validation_images_and_reports_on_the_other(tmp_path, monkeypatch, capsys):
    arguments = {"root": str(tmp_path / "shapes"), "train": 1, "val": 60, "test": 1, "image_size": 48}
    splits, index = [], ShapesSource.index
    monkeypatch.setattr(ShapesSource, "index", lambda self, split: splits.append(split) or index(self, split))
    source = {"class_path": "captioning.data.shapes.ShapesSource", "init_args": arguments}
    checkpoint = save_checkpoint(tmp_path / "best.ckpt", settings={"data": {"source": source}})
    export([str(checkpoint), "--output", str(tmp_path / "exported"), "--calibrate"])
    assert splits == ["val"]
    assert "calibrated on 30 validation images; on 30 others" in capsys.readouterr().out
    report = json.loads((tmp_path / "exported/calibration.json").read_text())
    assert report["images_fitted"] == report["images"] == 30 and report["split"] == "val"
    assert sum(item["count"] for item in report["captions"]) == 30
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

    export([str(checkpoint), "--output", str(tmp_path / "exported")])
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
        export([str(checkpoint), "--output", str(tmp_path / "exported"), "--calibrate"])
    assert ended.value.code == 2 and "--calibrate: the checkpoint names no data" in capsys.readouterr().err
    assert not (tmp_path / "exported").exists()
