from __future__ import annotations

import itertools
import json
import mmap
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from captioning.data.features import FeatureCache, FeatureWriter, features_size, reading, verify
from captioning.data.features.codes import decode, encode
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
    """A writer of three shards, of 3, 3 and 1 images."""
    options = {"paths": PATHS, "fingerprint": FINGERPRINT, "shape": (ROWS * COLS, D), "shard_images": 3, **changes}
    return FeatureWriter(folder, "train", **options)


def write(folder: Path, **changes) -> FeatureWriter:
    """Write what a writer finds missing, in batches that do not end where shards do."""
    out = writer(folder, **changes)
    for rows in torch.from_numpy(out.rows).split(2):
        out.write(annotations()[rows])
    return out


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """What an earlier version wrote: one file."""
    folder = tmp_path / "earlier"
    folder.mkdir()
    np.save(folder / "train.npy", annotations().half().numpy())
    header = {"format": 1, "fingerprint": FINGERPRINT, "shape": [N, ROWS * COLS, D], "done": N}
    (folder / "train.json").write_text(json.dumps(header))
    (folder / "train.images.json").write_text(json.dumps(PATHS))
    return folder


def test_what_is_written_is_read_to_fp16_rounding(cache):
    features = FeatureCache(cache, "train", FINGERPRINT)
    assert features.shape == (N, ROWS * COLS, D)
    assert features.grid_size == (ROWS, COLS)
    assert len(features) == N
    found = features.gather(range(N))
    assert found.dtype == torch.float16
    assert torch.equal(found, annotations().half())
    assert torch.allclose(found.float(), annotations(), rtol=2**-11, atol=1e-7)


def test_a_file_of_an_earlier_version_is_read_and_left_alone(earlier):
    features = FeatureCache(earlier, "train", FINGERPRINT)
    features.check(torch.arange(N))
    assert torch.equal(features.gather([6, 2, 3, 0]), annotations()[[6, 2, 3, 0]].half())
    before = (earlier / "train.npy").stat()
    assert not len(writer(earlier).rows)
    assert (earlier / "train.npy").stat() == before


def test_what_an_earlier_version_began_is_not_continued(earlier):
    header = json.loads((earlier / "train.json").read_text())
    (earlier / "train.json").write_text(json.dumps({**header, "done": 4}))
    (earlier / "train.npy").rename(earlier / "train.npy.part")
    with pytest.raises(InputError, match=r"train\.json: begun by an earlier version; delete it and train\.npy\.part"):
        writer(earlier)
    with pytest.raises(InputError, match=r"train\.npy: not there or not complete, as 1 of 1 files"):
        FeatureCache(earlier, "train", FINGERPRINT).check(torch.arange(2))


def test_a_batch_holds_the_rows_asked_for_in_their_order(cache):
    features = FeatureCache(cache, "train", FINGERPRINT)
    batch = features.gather(torch.tensor([4, 0, 4]))
    assert batch.shape == (3, ROWS * COLS, D)
    assert torch.equal(batch, annotations()[[4, 0, 4]].half())


@pytest.mark.parametrize("rows", [[-1], [0, N]])
def test_rows_that_are_not_there_are_refused(cache, rows):
    with pytest.raises(IndexError, match=f"rows must be in 0 .. {N - 1}"):
        FeatureCache(cache, "train", FINGERPRINT).gather(rows)


def test_the_system_is_told_which_rows_come_and_of_no_others(tmp_path, monkeypatch):
    """Half a page a row: no more than the pages that they lie in, neighbours of a shard as one."""
    size, dim = mmap.PAGESIZE // 2, mmap.PAGESIZE // 4
    writer(tmp_path, shape=(1, dim), shard_images=4).write(torch.zeros(N, 1, dim))
    features, told = FeatureCache(tmp_path, "train", FINGERPRINT), []
    will_need = reading._will_need

    def noted(mapped, start, length):
        told.append((len(mapped), start, start + length))
        will_need(mapped, start, length)

    monkeypatch.setattr(reading, "_will_need", noted)
    features.gather([1, 2, 3, 4, 0, 6])
    begin, first, second = 128, 128 + 4 * size, 128 + 3 * size  # lengths of the files
    expected = [(first, 1, 4), (second, 0, 1), (first, 0, 1), (second, 2, 3)]
    expected = [(length, begin + a * size, begin + b * size) for length, a, b in expected]
    assert told == [(length, a - a % mmap.PAGESIZE, b) for length, a, b in expected]
    assert features.gather([]).shape == (0, 1, dim)


def test_the_system_is_told_no_more_while_everything_is_in_memory_and_again_when_it_is_not(cache, monkeypatch):
    features, told, disk = FeatureCache(cache, "train", FINGERPRINT), [], itertools.count()
    monkeypatch.setattr(reading, "_will_need", lambda *_: told.append(1))
    monkeypatch.setattr(reading, "_disk_reads", lambda: next(disk))  # another number each time: something was read
    for _ in range(20):
        features.gather([1])
    assert len(told) == 20
    monkeypatch.setattr(reading, "_disk_reads", lambda: 0)
    for _ in range(20):
        features.gather([1])
    assert len(told) == 28
    monkeypatch.setattr(reading, "_disk_reads", lambda: next(disk))
    features.gather([1])  # waits for what it was not told of
    features.gather([1])
    assert len(told) == 29
    monkeypatch.setattr(reading, "_disk_reads", lambda: None)  # a system that does not count
    for _ in range(20):
        features.gather([1])
    assert len(told) == 49


@pytest.mark.skipif(not hasattr(os, "posix_fadvise") or sys.platform != "linux", reason="the page cache of Linux")
def test_what_a_disk_was_read_for_is_counted(tmp_path):
    file = tmp_path / "large"
    file.write_bytes(bytes(1 << 20))
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = reading._disk_reads()
        content = handle.read()
        if reading._disk_reads() == before:
            pytest.skip("this file system keeps its files in memory, or counts nothing")
        before = reading._disk_reads()
        handle.seek(0)
        assert handle.read() == content and reading._disk_reads() == before


def test_shards_are_ordinary_numpy_arrays_of_the_announced_size(cache):
    files = sorted((cache / "train").glob("*.npy"))
    arrays = [np.load(file) for file in files]
    assert [file.name for file in files] == ["00000.npy", "00001.npy", "00002.npy"]
    assert [len(array) for array in arrays] == [3, 3, 1] and arrays[0].dtype == np.float16
    assert np.array_equal(np.concatenate(arrays), annotations().half().numpy())
    assert sum(file.stat().st_size - 128 for file in files) == features_size((N, ROWS * COLS, D))
    assert not list(cache.rglob("*.part"))


def test_images_are_found_in_any_order(cache):
    features = FeatureCache(cache, "train", FINGERPRINT)
    rows = features.find(["images/5.jpg", "images/1.jpg"])
    assert rows.dtype == torch.int64
    assert rows.tolist() == [5, 1]
    with pytest.raises(InputError, match=r"train\.images\.json: has no features of image images/9\.jpg"):
        features.find(["images/1.jpg", "images/9.jpg"])


def test_pickling_takes_the_path_and_not_the_data(tmp_path):
    paths = [str(i) for i in range(400)]
    writer(tmp_path, paths=paths).write(annotations(400))
    features = FeatureCache(tmp_path, "train", FINGERPRINT)
    expected = features.gather([399])
    pickled = pickle.dumps(features)
    assert len(pickled) < 2000
    assert torch.equal(pickle.loads(pickled).gather([399]), expected)


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
    features.gather([0])  # mapped in the parent already
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


def test_shards_that_are_needed_and_missing_are_named(tmp_path):
    out = writer(tmp_path)
    out.write(annotations()[:5])
    assert (out.done, out.collected, out.total) == (3, 5, 7)
    features = FeatureCache(tmp_path, "train", FINGERPRINT)
    features.check(torch.tensor([2, 0]))
    assert torch.equal(features.gather([2, 0]), annotations()[[2, 0]].half())
    with pytest.raises(InputError, match=r"train/00001\.npy: not there or not complete, as 2 of 3 files .*finish them"):
        features.check(torch.arange(N))
    with pytest.raises(InputError, match=r"train/00001\.json: cannot be read"):
        features.gather([4])


@pytest.mark.parametrize("content", ["", "[]", '{"format": 9}'])
def test_a_damaged_header_is_named(cache, content):
    (cache / "train.json").write_text(content)
    with pytest.raises(InputError, match=r"train\.json: .*extract again"):
        FeatureCache(cache, "train", FINGERPRINT)


def test_a_damaged_array_is_named(cache):
    file = cache / "train" / "00001.npy"
    whole = file.read_bytes()
    for content in (whole[:-20], b"", np.zeros(3).tobytes()):
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"00001\.npy: cannot be read"):
            FeatureCache(cache, "train", FINGERPRINT).gather([3])
        with pytest.raises(InputError, match=r"00001\.npy: not there or not complete"):
            FeatureCache(cache, "train", FINGERPRINT).check(torch.tensor([3]))
    np.save(file, np.zeros((3, 6, 4), dtype=np.float16))
    with pytest.raises(InputError, match=r"holds float16 \(3, 6, 4\), its header says float16 \(3, 6, 5\)"):
        FeatureCache(cache, "train", FINGERPRINT).gather([3])


@pytest.mark.parametrize(
    "change", [{"sha256": 3}, {"step": [1.0]}, {"offset": "x"}, {"step": [float("nan")] * D}, {"offset": None}]
)
def test_a_damaged_record_is_named(tmp_path, change):
    write(tmp_path, dtype="uint8")
    file = tmp_path / "train" / "00000.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(InputError, match=r"00000\.json: damaged; delete it and extract again"):
        FeatureCache(tmp_path, "train", FINGERPRINT).gather([0])


def test_other_images_are_refused(cache):
    with pytest.raises(InputError, match="made from other images"):
        writer(cache, paths=PATHS[::-1])
    with pytest.raises(InputError, match="made from other images"):
        writer(cache, paths=PATHS[:3])


def test_values_beyond_fp16_are_refused(tmp_path):
    for bad in (70000.0, float("nan")):
        with pytest.raises(InputError, match="beyond fp16's 65504 in images 0 to 0 of train"):
            writer(tmp_path).write(torch.full((1, ROWS * COLS, D), bad))


def test_wrong_shapes_are_refused_with_the_right_one(tmp_path):
    out = writer(tmp_path)
    with pytest.raises(ValueError, match=r"must be \(B, 6, 5\), got \(2, 5, 6\)"):
        out.write(torch.zeros(2, 5, 6))
    with pytest.raises(ValueError, match=r"got \(8, 6, 5\)"):
        out.write(torch.zeros(8, 6, 5))


def test_a_disk_too_small_is_refused_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(InputError, match=r"GB are needed and 0\.00 GB are free"):
        writer(tmp_path)


def test_numbers_kept_in_another_way_are_not_continued(cache):
    with pytest.raises(InputError, match=r"train\.json: of --dtype float16, not uint8; give another --output"):
        writer(cache, dtype="uint8")


# Several writers, and writers that stop


def test_a_later_writer_goes_on_with_the_missing_shards(tmp_path):
    out = writer(tmp_path)
    out.write(annotations()[:4])
    out = writer(tmp_path, shard_images=5)  # the folder's own cut counts
    assert out.rows.tolist() == [3, 4, 5, 6] and out.done == 3
    first = (tmp_path / "train/00000.npy").stat()
    out.write(annotations()[3:])
    assert (tmp_path / "train/00000.npy").stat() == first
    assert torch.equal(FeatureCache(tmp_path, "train", FINGERPRINT).gather(range(N)), annotations().half())


def test_a_writer_that_has_written_nothing_leaves_nothing(tmp_path):
    writer(tmp_path / "new").write(annotations()[:2])
    assert not list((tmp_path / "new").iterdir())
    write(tmp_path / "new", dtype="uint8")


def test_two_writers_of_different_features_that_begin_together_do_not_mix(tmp_path):
    first, second = writer(tmp_path), writer(tmp_path, fingerprint=FINGERPRINT | {"grid_size": [9, 9]})
    first.write(annotations())
    with pytest.raises(InputError, match="another"):
        second.write(annotations() + 1)
    assert torch.equal(FeatureCache(tmp_path, "train", FINGERPRINT).gather(range(N)), annotations().half())


def shares_of(folder: Path, n: int, **changes) -> list[FeatureWriter]:
    return [writer(folder, share=(i, n), **changes) for i in range(n)]


@pytest.mark.parametrize("dtype", ["float16", "uint8"])
def test_shares_written_side_by_side_are_what_one_writer_writes(tmp_path, dtype):
    write(tmp_path / "alone", dtype=dtype)
    writers = shares_of(tmp_path / "both", 2, dtype=dtype)
    assert [out.rows.tolist() for out in writers] == [[0, 1, 2, 6], [3, 4, 5]]
    for _ in range(4):  # in turn
        for out in writers:
            if out.collected < out.total:
                out.write(annotations()[out.rows[out.collected]].unsqueeze(0))
    files = [path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").rglob("*.*")]
    assert len(files) == 8
    for file in files:
        assert (tmp_path / "alone" / file).read_bytes() == (tmp_path / "both" / file).read_bytes()
    assert len(list((tmp_path / "both").rglob("*.*"))) == 8


def test_readers_know_the_share_that_a_writer_wrote(tmp_path):
    writers = shares_of(tmp_path, 2)
    writers[1].write(annotations()[writers[1].rows])
    features = FeatureCache(tmp_path, "train", FINGERPRINT)
    shares = features.shares(torch.arange(N), 2)
    assert shares.tolist() == [0, 0, 0, 1, 1, 1, 0]
    features.check(torch.arange(N)[shares == 1])
    with pytest.raises(InputError, match=r"00000\.npy: not there"):
        features.check(torch.arange(N)[shares == 0])


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from captioning.data.features import FeatureCache, FeatureWriter, verify
from captioning.errors import InputError
root, fingerprint = Path(sys.argv[1]), {"grid_size": [2, 2]}

def write(folder, kill):
    operations = 0
    def at(event, args):
        nonlocal operations
        if event in ("open", "os.rename", "os.mkdir", "os.remove") and str(folder) in str(args[0]):
            operations += 1
            if operations == kill:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(at)
    options = {"paths": [str(i) for i in range(3)], "fingerprint": fingerprint, "shape": (4, 3), "shard_images": 2}
    writer = FeatureWriter(folder, "train", **options)
    for row in writer.rows.tolist():
        writer.write(torch.full((1, 4, 3), float(row)))

def child(folder, kill):
    process = os.fork()
    if not process:
        write(folder, kill)
        os._exit(0)
    return os.WTERMSIG(os.waitpid(process, 0)[1])

kill = 0
while True:
    kill += 1
    folder = root / str(kill)
    if not child(folder, kill):
        break
    if (folder / "train.json").exists():
        verify(folder)
    finished = {path: path.stat().st_mtime_ns for path in folder.glob("train/*.json")}
    assert not child(folder, 0)
    assert all(path.stat().st_mtime_ns == time for path, time in finished.items())
    assert not list(folder.glob("train/*.part"))
    verify(folder)
    found = FeatureCache(folder, "train", fingerprint).gather(range(3))
    assert found[:, 0, 0].tolist() == list(range(3))
print("killed", kill - 1)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_writer_killed_at_any_file_operation_leaves_no_half_shard(tmp_path):
    """What is there is always whole; the next writer does what is missing, and nothing again."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 15


@pytest.mark.parametrize("dtype", ["float16", "uint8"])
@pytest.mark.parametrize("place", [128, -1])
def test_a_changed_byte_is_found(tmp_path, capsys, dtype, place):
    write(tmp_path, dtype=dtype)
    verify(tmp_path)
    assert "train: 3 of 3 shards are here and were read" in capsys.readouterr().out
    file = tmp_path / "train/00001.npy"
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"00001\.npy: damaged, as 1 in all; delete and extract them again"):
        verify(tmp_path)
    file.unlink()
    verify(tmp_path)
    assert "train: 2 of 3 shards are here" in capsys.readouterr().out
    assert write(tmp_path, dtype=dtype).total == N
    verify(tmp_path)


def test_a_changed_scale_is_found(tmp_path):
    write(tmp_path, dtype="uint8")
    file = tmp_path / "train/00002.json"
    record = json.loads(file.read_text())
    record["step"][0] += 0.25
    file.write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"00002\.npy: damaged"):
        verify(tmp_path)


def test_there_must_be_something_to_verify(tmp_path, earlier, capsys):
    with pytest.raises(InputError, match="holds no features"):
        verify(tmp_path / "none")
    verify(earlier)
    assert "kept no checksums" in capsys.readouterr().out


# 8 bits


def test_codes_are_off_by_half_a_step_at_most_and_clip_nothing():
    x = torch.randn(4, 6, D, generator=torch.Generator().manual_seed(2)) * torch.tensor([1.0, 50.0, 1e-3, 0.0, 7.0])
    x[..., 4] = x[..., 4].clamp(min=0)  # a ReLU's
    x[..., 3] = 3.5  # a channel that is constant
    codes, scale = encode(x)
    found = torch.empty(x.shape, dtype=torch.float16)
    decode(codes, scale, found)
    assert codes.dtype == np.uint8 and codes.shape == x.shape
    low, high = x.amin((0, 1)), x.amax((0, 1))
    rounding = 2**-11 * x.abs() + 2**-24  # of fp16
    assert ((found.float() - x).abs() <= ((high - low) / 255 / 2 * 1.001 + rounding)).all()
    numbers = codes.astype(np.float64) * scale.step.astype(np.float64) + scale.offset
    np.testing.assert_allclose(found.double().numpy(), numbers, rtol=2**-10, atol=2**-24)
    for channel in (0, 1, 2, 4):
        assert codes[..., channel].min() == 0 and codes[..., channel].max() == 255
    assert (found[..., 3] == 3.5).all()
    assert (found[..., 4][x[..., 4] == 0] == 0).all()


def test_the_largest_numbers_of_fp16_survive():
    x = torch.tensor([65504.0, -65504.0, 0.0]).view(3, 1, 1)
    codes, scale = encode(x.half())
    found = torch.empty(x.shape, dtype=torch.float16)
    decode(codes, scale, found)
    assert found[:2].flatten().tolist() == [65504.0, -65504.0]


def test_8_bit_features_are_half_the_size_and_read_as_fp16(tmp_path):
    shape = (49, 64)
    x = torch.randn(N, *shape, generator=torch.Generator().manual_seed(3)).relu()
    for dtype in ("float16", "uint8"):
        writer(tmp_path / dtype, shape=shape, dtype=dtype).write(x)
    sizes = {
        dtype: sum(file.stat().st_size - 128 for file in (tmp_path / dtype).rglob("*.npy"))
        for dtype in ("float16", "uint8")
    }
    assert sizes["float16"] == 2 * sizes["uint8"] == 2 * features_size((N, *shape), "uint8")
    features = FeatureCache(tmp_path / "uint8", "train", FINGERPRINT)
    found = features.gather([5, 2, 3, 6])
    assert found.dtype == torch.float16
    for place, row in enumerate([5, 2, 3, 6]):
        shard = x[row // 3 * 3 : row // 3 * 3 + 3]
        half_a_step = (shard.amax((0, 1)) - shard.amin((0, 1))) / 510
        assert ((found[place].float() - x[row]).abs() <= half_a_step * 1.001 + 2**-10 * x[row]).all()


def test_decoding_does_not_depend_on_how_much_is_decoded_at_once():
    """More numbers than are decoded together: (3, 50, 700)."""
    x = torch.randn(3, 50, 700, generator=torch.Generator().manual_seed(4))
    codes, scale = encode(x)
    whole, one = torch.empty(3, 50, 700, dtype=torch.float16), torch.empty(1, 50, 700, dtype=torch.float16)
    decode(codes, scale, whole)
    for row in range(3):
        decode(codes[row : row + 1], scale, one)
        assert torch.equal(one[0], whole[row])
