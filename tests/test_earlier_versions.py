"""Checkpoints and configs that earlier versions wrote, with the class paths of their time, still work.

``earlier/`` has the config and the last checkpoint of a short run before the package was divided into rooms.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from captioning.attention import AdditiveScore, HardAttention
from captioning.captioner import load
from captioning.component import current_path

EARLIER = Path(__file__).parent / "earlier"


def class_paths(config: object) -> list[str]:
    if isinstance(config, list):
        return [path for item in config for path in class_paths(item)]
    if not isinstance(config, dict):
        return []
    own = [config["class_path"]] if isinstance(config.get("class_path"), str) else []
    return own + [path for value in config.values() for path in class_paths(value)]


def test_the_files_name_classes_as_they_were_named_then():
    stored = torch.load(EARLIER / "last.ckpt", weights_only=True)["captioning"]
    assert "captioning.attention.hard.HardAttention" in class_paths(stored["decoder"])
    config = yaml.safe_load((EARLIER / "config.yaml").read_text())
    assert "captioning.schedules.WarmupCosine" in class_paths(config)


def test_an_earlier_checkpoint_captions_as_it_did():
    captioner = load(EARLIER / "last.ckpt")
    pixels = np.random.default_rng(0).integers(0, 256, (112, 112, 3), dtype=np.uint8)
    caption = captioner.caption(Image.fromarray(pixels))
    assert isinstance(captioner.captioner.decoder.attention, HardAttention)
    assert caption.text == "a a a"
    assert caption.score == pytest.approx(-13.768999, abs=1e-4)
    expected = [[0.02307893, 0.02276742], [0.02307196, 0.02274883], [0.02307158, 0.02274694]]
    np.testing.assert_allclose(caption.alphas[:, :2], expected, atol=1e-6)


def test_an_earlier_config_is_read_and_saved_with_public_paths():
    command = ["fit", "--config", str(EARLIER / "config.yaml"), "--print_config"]
    done = subprocess.run([sys.executable, "-m", "captioning", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ours = [path for path in class_paths(yaml.safe_load(done.stdout)) if path.startswith("captioning.")]
    assert {
        "captioning.attention.AdditiveScore",
        "captioning.attention.AnnotationLSTM",
        "captioning.attention.HardAttention",
        "captioning.data.ShapesSource",
        "captioning.encoders.ConvEncoder",
        "captioning.objective.ArcticReduction",
        "captioning.objective.LeaveOneOut",
        "captioning.training.Throughput",
        "captioning.training.WarmupCosine",
    } <= set(ours)
    assert ours == [current_path(path) for path in ours]


def test_current_path_leaves_other_packages_and_unknown_names_alone():
    assert current_path("captioning.attention.scores.AdditiveScore") == "captioning.attention.AdditiveScore"
    assert current_path("torch.optim.AdamW") == "torch.optim.AdamW"
    assert current_path("captioning.nowhere.Thing") == "captioning.nowhere.Thing"
    assert isinstance(AdditiveScore(), AdditiveScore)


def test_training_goes_on_from_an_earlier_checkpoint(tmp_path):
    options = ["--ckpt_path", str(EARLIER / "last.ckpt"), "--trainer.max_epochs", "2", "--runs", str(tmp_path)]
    options += ["--data.source.root", str(tmp_path / "shapes"), "--data.source.train=40", "--data.source.val=8"]
    command = ["fit", "--config", str(EARLIER / "config.yaml"), *options]
    done = subprocess.run([sys.executable, "-m", "captioning", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "epoch 2, step 8" in done.stdout
