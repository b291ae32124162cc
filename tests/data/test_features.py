from __future__ import annotations

import contextlib
import json
import mmap
import multiprocessing
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import captioning.data.features
from captioning.data.features import FeatureCache, FeatureWriter, features_size
from captioning.errors import InputError

N, ROWS, COLS, D = 7, 2, 3, 5
PATHS = [f"images/{i}.jpg" for i in range(N)]
FINGERPRINT = {
    "encoder": "captioning.encoders.TorchvisionEncoder",
    "name": "vgg19",
    "node": "features.35",
    "weights": "sha256:aa",
    "preprocessing": {"resize": 256, "crop": 224},
    "grid_size": [ROWS, COLS],
    "annotation_dim": D,
}


def annotations(n: int = N) -> Tensor:
    return torch.randn(n, ROWS * COLS, D, generator=torch.Generator().manual_seed(1))


def writer(folder: Path, **changes) -> FeatureWriter:
    return FeatureWriter(
        folder, "train", **{"paths": PATHS, "fingerprint": FINGERPRINT, "shape": (ROWS * COLS, D), **changes}
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    with writer(tmp_path) as out:
        for chunk in annotations().split(3):
            out.write(chunk)
    return tmp_path


def test_what_is_written_is_read_to_fp16_rounding(cache):
    features = FeatureCache(cache, "train", FINGERPRINT)
    assert features.shape == (N, ROWS * COLS, D)
    assert features.grid_size == (ROWS, COLS)
    assert len(features) == N
    for row in range(N):
        assert features.rows(row).dtype == torch.float16
        assert torch.equal(features.rows(row), annotations()[row].half())
    assert torch.allclose(features.gather(range(N)).float(), annotations(), rtol=2**-11, atol=1e-7)


def test_a_batch_holds_the_rows_asked_for_in_their_order(cache):
    features = FeatureCache(cache, "train", FINGERPRINT)
    batch = features.gather(torch.tensor([4, 0, 4]))
    assert batch.shape == (3, ROWS * COLS, D)
    assert torch.equal(batch, annotations()[[4, 0, 4]].half())


@pytest.mark.parametrize("rows", [[-1], [0, N]])
def test_rows_that_are_not_there_are_refused(cache, rows):
    with pytest.raises(IndexError, match=f"rows must be in 0 .. {N - 1}"):
        FeatureCache(cache, "train", FINGERPRINT).gather(rows)


def test_rows_are_views_of_the_file(cache):
    features = FeatureCache(cache, "train", FINGERPRINT)
    assert features.rows(2).data_ptr() - features.rows(0).data_ptr() == 2 * 2 * ROWS * COLS * D
    assert features.rows(1).untyped_storage().nbytes() == N * 2 * ROWS * COLS * D


def test_the_system_is_told_which_rows_come_and_of_no_others(tmp_path, monkeypatch):
    """Half a page a row: no more than the pages that they lie in, neighbours as one."""
    size, dim = mmap.PAGESIZE // 2, mmap.PAGESIZE // 4
    with writer(tmp_path, shape=(1, dim)) as out:
        out.write(torch.zeros(N, 1, dim))
    features, told = FeatureCache(tmp_path, "train", FINGERPRINT), []
    will_need = captioning.data.features._will_need

    def noted(mapped, start, length):
        told.append((start, start + length))
        will_need(mapped, start, length)

    monkeypatch.setattr("captioning.data.features._will_need", noted)
    features.gather([2, 3, 4, 0, 6])
    begin = (tmp_path / "train.npy").stat().st_size - N * size
    expected = [(begin + a * size, begin + b * size) for a, b in ((2, 5), (0, 1), (6, 7))]
    assert told == [(a - a % mmap.PAGESIZE, b) for a, b in expected]
    assert features.gather([]).shape == (0, 1, dim)


def test_the_file_is_an_ordinary_numpy_array_of_the_announced_size(cache):
    array = np.load(cache / "train.npy")
    assert array.dtype == np.float16
    assert np.array_equal(array, annotations().half().numpy())
    assert (cache / "train.npy").stat().st_size == features_size((N, ROWS * COLS, D))
    assert not list(cache.glob("*.part"))


def test_images_are_found_in_any_order(cache):
    features = FeatureCache(cache, "train", FINGERPRINT)
    rows = features.find(["images/5.jpg", "images/1.jpg"])
    assert rows.dtype == torch.int64
    assert rows.tolist() == [5, 1]
    with pytest.raises(InputError, match=r"train\.npy: has no features of image images/9\.jpg"):
        features.find(["images/1.jpg", "images/9.jpg"])


def test_pickling_takes_the_path_and_not_the_data(tmp_path):
    paths = [str(i) for i in range(400)]
    with writer(tmp_path, paths=paths) as out:
        out.write(annotations(400))
    features = FeatureCache(tmp_path, "train", FINGERPRINT)
    features.rows(0)
    pickled = pickle.dumps(features)
    assert len(pickled) < 2000
    assert torch.equal(pickle.loads(pickled).rows(399), features.rows(399))


class Batches(torch.utils.data.Dataset):
    def __init__(self, features: FeatureCache) -> None:
        self.features = features

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Tensor:
        return self.features.gather([i, i + 2])


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods()[:1])
def test_workers_read_the_same_numbers(cache, method):
    features = FeatureCache(cache, "train", FINGERPRINT)
    features.rows(0)  # mapped in the parent already
    loader = DataLoader(Batches(features), batch_size=None, num_workers=2, multiprocessing_context=method)
    for i, batch in enumerate(loader):
        assert batch.is_shared()
        assert torch.equal(batch, annotations()[[i, i + 2]].half())


# Refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "vgg16"}, "name 'vgg19' there, 'vgg16' here"),
        ({"node": "features.28"}, "node 'features.35' there, 'features.28' here"),
        ({"weights": "sha256:bb"}, "weights 'sha256:aa' there, 'sha256:bb' here"),
        ({"preprocessing": {"resize": 232, "crop": 224}}, "preprocessing .*256.* there, .*232.* here"),
        ({"model_args": {"pad_type": "same"}}, "model_args None there"),
        ({"name": "a", "node": "b"}, "name .*; node "),
    ],
)
def test_another_encoders_features_are_refused_by_name(cache, change, message):
    for use in (
        lambda: FeatureCache(cache, "train", {**FINGERPRINT, **change}),
        lambda: writer(cache, fingerprint={**FINGERPRINT, **change}),
    ):
        with pytest.raises(InputError, match=message) as caught:
            use()
        assert "train.json" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_missing_cache_says_how_to_make_it(tmp_path):
    with pytest.raises(InputError, match=r"val\.json: no features; run scripts/extract_features\.py"):
        FeatureCache(tmp_path, "val", FINGERPRINT)


def test_an_unfinished_cache_is_refused(tmp_path):
    with writer(tmp_path) as out:
        out.write(annotations()[:4])
    with pytest.raises(InputError, match=r"4 of 7 images are done; finish it"):
        FeatureCache(tmp_path, "train", FINGERPRINT)


@pytest.mark.parametrize("content", ["", "[]", '{"format": 9}'])
def test_a_damaged_header_is_named(cache, content):
    (cache / "train.json").write_text(content)
    with pytest.raises(InputError, match=r"train\.json: .*extract again"):
        FeatureCache(cache, "train", FINGERPRINT)


def test_a_damaged_array_is_named(cache):
    whole = (cache / "train.npy").read_bytes()
    for content in (whole[:-20], b"", np.zeros(3).tobytes()):
        (cache / "train.npy").write_bytes(content)
        with pytest.raises(InputError, match=r"train\.npy: cannot be read"):
            FeatureCache(cache, "train", FINGERPRINT).rows(0)
    np.save(cache / "train.npy", np.zeros((N, 6, 4), dtype=np.float16))
    with pytest.raises(InputError, match=r"holds float16 \(7, 6, 4\), its header says float16 \(7, 6, 5\)"):
        FeatureCache(cache, "train", FINGERPRINT).rows(0)


def test_other_images_are_refused(cache):
    with pytest.raises(InputError, match="made from other images"):
        writer(cache, paths=PATHS[::-1])
    with pytest.raises(InputError, match="made from other images"):
        writer(cache, paths=PATHS[:3])


def test_values_beyond_fp16_are_refused(tmp_path):
    for bad in (70000.0, float("nan")):
        with writer(tmp_path) as out, pytest.raises(InputError, match="beyond fp16's 65504 in images 0 to 0 of train"):
            out.write(torch.full((1, ROWS * COLS, D), bad))


def test_wrong_shapes_are_refused_with_the_right_one(tmp_path):
    with writer(tmp_path) as out:
        with pytest.raises(ValueError, match=r"must be \(B, 6, 5\), got \(2, 5, 6\)"):
            out.write(torch.zeros(2, 5, 6))
        with pytest.raises(ValueError, match=r"got \(8, 6, 5\)"):
            out.write(torch.zeros(8, 6, 5))


def test_a_disk_too_small_is_refused_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(InputError, match=r"GB are needed and 0\.00 GB are free"):
        writer(tmp_path)


# Resuming


def test_an_interrupted_writer_is_continued(tmp_path):
    out = writer(tmp_path)
    with contextlib.suppress(KeyboardInterrupt), out:
        out.write(annotations()[:2])
        out.write(annotations()[2:4])
        raise KeyboardInterrupt
    with writer(tmp_path) as out:
        assert out.done == 4
        out.write(annotations()[4:])
    assert torch.equal(FeatureCache(tmp_path, "train", FINGERPRINT).gather(range(N)), annotations().half())


def test_data_after_the_last_header_is_written_again(tmp_path):
    with writer(tmp_path) as out:
        out.write(annotations()[:5])
    header = json.loads((tmp_path / "train.json").read_text())
    (tmp_path / "train.json").write_text(json.dumps({**header, "done": 3}))  # as a power cut may leave it
    with writer(tmp_path) as out:
        assert out.done == 3
        out.write(annotations()[3:])
    assert torch.equal(FeatureCache(tmp_path, "train", FINGERPRINT).gather(range(N)), annotations().half())


@pytest.mark.parametrize("kept", [0, 60, 128 + 2 * 2 * ROWS * COLS * D + 3])
def test_a_partial_file_cut_short_is_continued_from_what_is_there(tmp_path, kept):
    with writer(tmp_path) as out:
        out.write(annotations()[:5])
    part = tmp_path / "train.npy.part"
    part.write_bytes(part.read_bytes()[:kept])
    with writer(tmp_path) as out:
        assert out.done == (2 if kept > 128 else 0)
        out.write(annotations()[out.done :])
    assert torch.equal(FeatureCache(tmp_path, "train", FINGERPRINT).gather(range(N)), annotations().half())


def test_a_complete_cache_is_left_alone(cache):
    before = (cache / "train.npy").stat()
    with writer(cache) as out:
        assert out.done == N
    assert (cache / "train.npy").stat() == before
