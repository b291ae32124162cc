"""Cached features are the encoder's annotations up to fp16 rounding, and an extraction resumes."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import save_image, write_features

from captioning.data.extraction import extract_features
from captioning.data.features import Features, features_key
from captioning.data.records import CaptionIndex, ImageEntry
from captioning.data.transforms import Preprocessing
from captioning.errors import InputError

FINGERPRINT = {"name": "vgg19", "preprocessing": {"resize": 256, "crop": 224}, "grid_size": [2, 3]}
PATHS = [f"images/{i}.jpg" for i in range(7)]
SHAPE = (6, 5)


def annotations(n: int = 7) -> torch.Tensor:
    return torch.randn(n, *SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    write_features(tmp_path, "train", FINGERPRINT, PATHS, annotations())
    return tmp_path


def test_features_are_read_as_written_up_to_fp16_rounding(cache):
    features = Features(cache, "train", FINGERPRINT, PATHS)
    read = features.gather(np.arange(7))
    assert read.dtype == torch.float16 and torch.equal(read, annotations().half())
    assert torch.equal(features.gather(np.array([4, 0, 4])), read[[4, 0, 4]])


def test_features_are_read_in_any_order_also_in_another_process(cache):
    features = Features(cache, "train", FINGERPRINT, ["images/5.jpg", "images/1.jpg"])
    pickled = pickle.dumps(features)
    assert len(pickled) < 500  # the place and not the data
    for same in (features, pickle.loads(pickled)):
        assert torch.equal(same.gather(np.array([1, 0])), annotations()[[1, 5]].half())
    with pytest.raises(InputError, match=r"train\.json: has no features of image images/9\.jpg"):
        Features(cache, "train", FINGERPRINT, ["images/1.jpg", "images/9.jpg"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "vgg16"}, "name 'vgg19' there, 'vgg16' here"),
        ({"name": "a", "node": "b"}, "name .*; node None there, 'b' here"),
        (features_key("train", {}, mirrored=True)[1], "flipped None there, True here"),
    ],
)
def test_another_encoders_features_are_refused_by_name(cache, change, message):
    other = FINGERPRINT | change
    with pytest.raises(InputError, match=rf"train\.json: features of another encoder \([^\n]*{message}[^\n]*$"):
        Features(cache, "train", other, PATHS)


def test_missing_incomplete_and_old_features_are_refused_with_a_remedy(cache):
    with pytest.raises(InputError, match=r"val\.json: no features; run captioning extract"):
        Features(cache, "val", FINGERPRINT, PATHS)
    about = (cache / "train.json").read_text()
    (cache / "train.json").write_text(about.replace('"done": 7', '"done": 5'))
    with pytest.raises(InputError, match=r"train\.json: only 5 of 7 images are done; finish captioning extract"):
        Features(cache, "train", FINGERPRINT, PATHS)
    for content in ("", '{"format": 3, "shard_images": 2}'):  # of an earlier version
        (cache / "train.json").write_text(content)
        with pytest.raises(InputError, match=r"train\.json: .*extract again"):
            Features(cache, "train", FINGERPRINT, PATHS)


# Extraction


class Shrink:
    """An encoder that averages blocks of pixels; it can stop at an image as Ctrl-C does."""

    preprocessing = Preprocessing(8, 6, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    grid_size = (2, 3)
    annotation_dim = 3

    def __init__(self, scale: float = 1.0, stop_after: int = 10**9) -> None:
        self.scale, self.left = scale, stop_after

    def frozen_identity(self) -> dict[str, Any]:
        return {"encoder": "Shrink", "grid_size": self.grid_size}

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        if self.left < len(images):
            raise KeyboardInterrupt
        self.left -= len(images)
        return self.scale * F.avg_pool2d(images, (3, 2)).flatten(2).transpose(1, 2)


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> CaptionIndex:
    root = tmp_path_factory.mktemp("images")
    for i in range(5):
        save_image(root / f"{i}.jpg", seed=i)
    return CaptionIndex.build(root, [ImageEntry(i, f"{i}.jpg", ["a dog"]) for i in range(5)])


def extract(index: CaptionIndex, output: Path, encoder: Shrink | None = None, **options: Any) -> None:
    common = {"device": torch.device("cpu"), "batch_size": 2, "num_workers": 0}
    extract_features(encoder or Shrink(), {"train": index}, output, **common | options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_features_equal_the_encoders_output_for_images_and_mirror_images(index, tmp_path, capsys, workers):
    extract(index, tmp_path, mirrored=True, num_workers=workers)
    encoder = Shrink()
    images = torch.stack([encoder.preprocessing(index.image(i, encoder.preprocessing)) for i in range(5)])
    for mirrored in (False, True):
        features = Features(tmp_path, *features_key("train", encoder.frozen_identity(), mirrored=mirrored), index.paths)
        expected = encoder(images.flip(3) if mirrored else images)
        torch.testing.assert_close(features.gather(np.arange(5)).float(), expected, rtol=2**-10, atol=1e-4)
    assert "train: 5 images, 0.00 GB; 0 images done already" in capsys.readouterr().out


def test_ctrl_c_keeps_extracted_features_and_the_same_call_resumes(index, tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        extract(index, tmp_path / "stopped", Shrink(stop_after=4))
    extract(index, tmp_path / "stopped", Shrink(stop_after=1))  # computes the fifth image alone
    assert "4 images done already" in capsys.readouterr().out
    extract(index, tmp_path / "whole")
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_features_of_other_images_or_another_encoder_are_not_overwritten(index, tmp_path):
    extract(index, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(InputError, match="made from other images"):
        extract(index.take(3), tmp_path)
    other = Shrink()
    other.frozen_identity = lambda: {"encoder": "Other"}
    with pytest.raises(InputError, match="features of another encoder"):
        extract(index, tmp_path, other)
    assert contents(tmp_path) == before


def test_values_beyond_fp16_are_refused(index, tmp_path):
    with pytest.raises(InputError, match="beyond fp16's 65504 in images 0 to 1 of train"):
        extract(index, tmp_path, Shrink(scale=1e6))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_one_line_and_extracted_features_are_kept(index, tmp_path, workers):
    (tmp_path / "bad.jpg").write_text("no image")
    entries = [*(ImageEntry(i, str(index.image_path(i)), ["a"]) for i in range(2)), ImageEntry(9, "bad.jpg", ["a"])]
    with pytest.raises(InputError, match=r"^[^\n]*bad\.jpg: cannot be read as an image[^\n]*$"):
        extract(CaptionIndex.build(tmp_path, entries), tmp_path / "out", num_workers=workers)
    assert json.loads((tmp_path / "out/train.json").read_text())["done"] == 2


def test_a_disk_that_is_too_small_is_reported_before_the_extraction(index, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(InputError, match=r"needs 0\.00 GB, 0\.00 GB are free"):
        extract(index, tmp_path / "out")
