from __future__ import annotations

import itertools
import json
import mmap
import multiprocessing
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from captioning.data.features import FeatureCache, FeatureWriter, reading, verify
from captioning.errors import InputError

N, HEIGHT, WIDTH, D = 7, 2, 3, 5
PATHS = [f"images/{i}.jpg" for i in range(N)]
FINGERPRINT = {
    "encoder": "captioning.encoders.TorchvisionEncoder",
    "name": "vgg19",
    "node": "features.35",
    "weights": "sha256:aa",
    "preprocessing": {"resize": 256, "crop": 224},
    "grid_size": [HEIGHT, WIDTH],
    "annotation_dim": D,
}


def annotations(n: int = N) -> Tensor:
    return torch.randn(n, HEIGHT * WIDTH, D, generator=torch.Generator().manual_seed(1))


def writer(folder: Path, **changes) -> FeatureWriter:
    """A writer of three shards, of 3, 3 and 1 images."""
    options = {"paths": PATHS, "fingerprint": FINGERPRINT, "shape": (HEIGHT * WIDTH, D), "shard_images": 3, **changes}
    return FeatureWriter(folder, "train", **options)


def write(folder: Path) -> None:
    """Write the missing shards, in batches that do not end where shards do."""
    out = writer(folder)
    for rows in torch.from_numpy(out.rows).split(2):
        out.write(annotations()[rows])


def opened(folder: Path) -> FeatureCache:
    return FeatureCache(folder, "train", FINGERPRINT)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


def test_what_is_written_is_read_to_fp16_rounding(cache):
    features = opened(cache)
    assert features.shape == (N, HEIGHT * WIDTH, D)
    assert features.grid_size == (HEIGHT, WIDTH)
    assert len(features) == N
    read = features.gather(range(N))
    assert read.dtype == torch.float16
    assert torch.equal(read, annotations().half())
    assert torch.allclose(read.float(), annotations(), rtol=2**-11, atol=1e-7)


@pytest.mark.parametrize("rows", [[4, 0, 4], [2, 0]])
def test_a_batch_holds_the_rows_asked_for_in_their_order(cache, rows):
    assert torch.equal(opened(cache).gather(torch.tensor(rows)), annotations()[rows].half())


@pytest.mark.parametrize("rows", [[-1], [0, N]])
def test_rows_that_are_not_there_are_refused(cache, rows):
    with pytest.raises(IndexError, match=f"rows must be in 0 .. {N - 1}"):
        opened(cache).gather(rows)


def test_the_system_is_told_which_rows_come_and_of_no_others(tmp_path, monkeypatch):
    """Half a page a row: no more than the pages that they lie in, neighbours of a shard as one."""
    size, dim = mmap.PAGESIZE // 2, mmap.PAGESIZE // 4
    writer(tmp_path, shape=(1, dim), shard_images=4).write(torch.zeros(N, 1, dim))
    features, advice = opened(tmp_path), []
    will_need = reading._will_need

    def noted(mapped, start, length):
        advice.append((len(mapped), start, start + length))
        will_need(mapped, start, length)

    monkeypatch.setattr(reading, "_will_need", noted)
    features.gather([1, 2, 3, 4, 0, 6])
    begin, first, second = 128, 128 + 4 * size, 128 + 3 * size  # lengths of the files
    expected = [(first, 1, 4), (second, 0, 1), (first, 0, 1), (second, 2, 3)]
    expected = [(length, begin + a * size, begin + b * size) for length, a, b in expected]
    assert advice == [(length, a - a % mmap.PAGESIZE, b) for length, a, b in expected]
    assert features.gather([]).shape == (0, 1, dim)


def test_the_system_gets_no_advice_while_everything_is_in_memory(cache, monkeypatch):
    features, advice, reads = opened(cache), [], itertools.count()
    monkeypatch.setattr(reading, "_will_need", lambda *_: advice.append(1))

    def advice_after(batches: int, disk_reads) -> int:
        monkeypatch.setattr(reading, "_disk_reads", disk_reads)
        for _ in range(batches):
            features.gather([1])
        return len(advice)

    assert advice_after(20, lambda: next(reads)) == 20  # a growing number: every batch reads from the disk
    assert advice_after(20, lambda: 0) == 28
    assert advice_after(2, lambda: next(reads)) == 29  # the first batch has to read without advice
    assert advice_after(20, lambda: None) == 49  # a system that does not count


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


def test_shards_are_ordinary_numpy_arrays(cache):
    files = sorted((cache / "train").iterdir())
    arrays = [np.load(file) for file in files]
    assert [file.name for file in files] == ["00000.npy", "00001.npy", "00002.npy"]
    assert [len(array) for array in arrays] == [3, 3, 1] and arrays[0].dtype == np.float16
    assert np.array_equal(np.concatenate(arrays), annotations().half().numpy())


def test_images_are_found_in_any_order(cache):
    rows = opened(cache).find(["images/5.jpg", "images/1.jpg"])
    assert rows.dtype == torch.int64
    assert rows.tolist() == [5, 1]
    with pytest.raises(InputError, match=r"train\.images\.json: has no features of image images/9\.jpg"):
        opened(cache).find(["images/1.jpg", "images/9.jpg"])


def test_pickling_takes_the_path_and_not_the_data(tmp_path):
    writer(tmp_path, paths=[str(i) for i in range(400)]).write(annotations(400))
    features = opened(tmp_path)
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
    features = opened(cache)
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
    with pytest.raises(InputError, match=r"val\.json: no features; run captioning extract"):
        FeatureCache(tmp_path, "val", FINGERPRINT)


def test_shards_that_are_needed_and_missing_are_named(tmp_path):
    out = writer(tmp_path)
    out.write(annotations()[:5])
    assert (out.done, out.collected, out.total) == (3, 5, 7)
    features = opened(tmp_path)
    features.check(torch.tensor([2, 0]))
    assert torch.equal(features.gather([2, 0]), annotations()[[2, 0]].half())
    with pytest.raises(InputError, match=r"train/00001\.npy: missing or incomplete, like 2 of 3 files .*finish them"):
        features.check(torch.arange(N))
    with pytest.raises(InputError, match=r"train/00001\.npy: missing"):
        features.gather([4])


@pytest.mark.parametrize("content", ["", "[]", '{"format": 9}'])
def test_a_damaged_manifest_is_named(cache, content):
    (cache / "train.json").write_text(content)
    with pytest.raises(InputError, match=r"train\.json: .*extract again"):
        opened(cache)


@pytest.mark.parametrize("content", [b"", np.zeros(3).tobytes()])
def test_an_incomplete_array_is_named(cache, content):
    file = cache / "train" / "00001.npy"
    file.write_bytes(content)
    with pytest.raises(
        InputError, match=rf"00001\.npy: has {len(content)} bytes instead of 308; delete it and extract"
    ):
        opened(cache).gather([3])
    with pytest.raises(InputError, match=r"00001\.npy: missing or incomplete"):
        opened(cache).check(torch.tensor([3]))


def test_other_images_are_refused(cache):
    for paths in (PATHS[::-1], PATHS[:3]):
        with pytest.raises(InputError, match="made from other images"):
            writer(cache, paths=paths)


def test_values_beyond_fp16_are_refused(tmp_path):
    for bad in (70000.0, float("nan")):
        with pytest.raises(InputError, match="beyond fp16's 65504 in images 0 to 0 of train"):
            writer(tmp_path).write(torch.full((1, HEIGHT * WIDTH, D), bad))


def test_wrong_shapes_are_refused_with_the_right_one(tmp_path):
    out = writer(tmp_path)
    with pytest.raises(ValueError, match=r"must be \(B, 6, 5\), got \(2, 5, 6\)"):
        out.write(torch.zeros(2, 5, 6))
    with pytest.raises(ValueError, match=r"got \(8, 6, 5\)"):
        out.write(torch.zeros(8, 6, 5))


# Several writers, and writers that stop


def test_a_later_writer_goes_on_with_the_missing_shards(tmp_path):
    out = writer(tmp_path)
    out.write(annotations()[:4])
    out = writer(tmp_path, shard_images=5)  # the shards of the folder count
    assert out.rows.tolist() == [3, 4, 5, 6] and out.done == 3
    first = (tmp_path / "train/00000.npy").stat()
    out.write(annotations()[3:])
    assert (tmp_path / "train/00000.npy").stat() == first
    assert torch.equal(opened(tmp_path).gather(range(N)), annotations().half())


def test_a_writer_that_has_completed_no_shard_leaves_nothing(tmp_path):
    writer(tmp_path / "new").write(annotations()[:2])
    assert not (tmp_path / "new").exists()


def test_two_writers_of_different_features_that_begin_together_do_not_mix(tmp_path):
    first, second = writer(tmp_path), writer(tmp_path, fingerprint=FINGERPRINT | {"grid_size": [9, 9]})
    first.write(annotations())
    with pytest.raises(InputError, match="another"):
        second.write(annotations() + 1)
    assert torch.equal(opened(tmp_path).gather(range(N)), annotations().half())


def test_processes_side_by_side_write_what_one_writes(tmp_path):
    write(tmp_path / "alone")
    writers = [writer(tmp_path / "both", process=(i, 2)) for i in range(2)]
    assert [out.rows.tolist() for out in writers] == [[0, 1, 2, 6], [3, 4, 5]]
    for _ in range(4):  # in turn
        for out in writers:
            if out.collected < out.total:
                out.write(annotations()[out.rows[out.collected]].unsqueeze(0))
    alone, both = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}
        for folder in (tmp_path / "alone", tmp_path / "both")
    )
    assert len(alone) == 5 and alone == both


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from captioning.data.features import FeatureCache, FeatureWriter
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

def shards(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.glob("train/*.npy")}

kill = 0
while True:
    kill += 1
    folder = root / str(kill)
    if not child(folder, kill):
        break
    before = shards(folder)
    assert not child(folder, 0)
    assert before.items() <= shards(folder).items() and len(shards(folder)) == 2
    assert not list(folder.glob("train/*.part"))
    annotations = FeatureCache(folder, "train", fingerprint).gather(range(3))
    assert (annotations == torch.arange(3).view(3, 1, 1)).all()
print("killed", kill - 1)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_writer_killed_at_any_file_operation_leaves_no_half_shard(tmp_path):
    """A shard with its name is whole; the next writer writes the missing ones and no other."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 15


# Checksums


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def in_fortran_order(file: Path) -> None:
    np.save(file, np.asfortranarray(np.load(file)))


DAMAGES = {
    "deleted": (lambda file: file.unlink(), "missing"),
    "truncated": (lambda file: file.write_bytes(file.read_bytes()[:-2]), "has 306 bytes instead of 308"),
    "appended": (lambda file: file.write_bytes(file.read_bytes() + b"\0\0"), "has 310 bytes instead of 308"),
    "first number": (lambda file: flip(file, 128), "does not match its checksum"),
    "last number": (lambda file: flip(file, -1), "does not match its checksum"),
    "header": (lambda file: flip(file, 60), "does not match its checksum"),
    "checksum": (lambda file: file.write_bytes(re.sub(b"# crc32 .{8}", b"", file.read_bytes())), "has 292 bytes"),
    "fortran": (in_fortran_order, "does not match its checksum"),
    "of another place": (lambda file: shutil.copy(file.with_name("00000.npy"), file), "does not match its checksum"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_of_a_shard_is_noticed(cache, damage, capsys):
    verify(cache)
    assert "train: 3 shards were read" in capsys.readouterr().out
    case, message = DAMAGES[damage]
    case(cache / "train/00001.npy")
    with pytest.raises(InputError, match=rf"train/00001\.npy: {message}.*\(damaged shards: 1\)") as caught:
        verify(cache)
    assert "\n" not in str(caught.value)


def test_every_split_is_verified_and_a_folder_must_hold_one(cache):
    FeatureWriter(cache, "val", paths=["a"], fingerprint=FINGERPRINT, shape=(1, 1)).write(torch.ones(1, 1, 1))
    verify(cache)
    flip(cache / "val/00000.npy", -1)
    with pytest.raises(InputError, match=r"val/00000\.npy: does not match"):
        verify(cache)
    (cache / "val.json").unlink()
    with pytest.raises(InputError, match=r"val\.json: missing"):
        verify(cache)
    with pytest.raises(InputError, match="holds no features"):
        verify(cache / "nothing")


@pytest.mark.parametrize("damage", sorted(set(DAMAGES) - {"deleted", "truncated", "appended", "checksum"}))
def test_a_damaged_shard_is_noticed_before_work_starts_and_when_it_is_read(cache, damage):
    DAMAGES[damage][0](cache / "train/00001.npy")
    for use in (lambda features: features.check(torch.arange(N)), lambda features: features.gather([0, 3])):
        with pytest.raises(
            InputError, match=r"train/00001\.npy: does not match its checksum; delete it and extract"
        ) as caught:
            use(opened(cache))
        assert "\n" not in str(caught.value)
    opened(cache).gather([0, 6])  # the other shards


def test_a_shard_is_summed_once_and_not_again_in_workers(cache, monkeypatch):
    features, read = opened(cache), []
    damage_of = reading.damage_of
    monkeypatch.setattr(reading, "damage_of", lambda manifest, shard: read.append(shard) or damage_of(manifest, shard))
    features.check(torch.tensor([0, 6]))
    assert read == [0, 2]
    worker = pickle.loads(pickle.dumps(features))
    worker.gather(range(N)), features.gather([0, 6])
    assert read == [0, 2, 1]


def test_a_list_of_images_in_another_order_is_refused(cache):
    """Each image would get the annotations of another one."""
    (cache / "train.images.json").write_text(json.dumps(PATHS[::-1]))
    for use in (lambda: opened(cache).find(PATHS), lambda: verify(cache), lambda: writer(cache)):
        with pytest.raises(InputError, match=r"train\.images\.json: does not match its checksum; delete the folder"):
            use()


def test_annotations_of_any_strides_are_written_in_order(tmp_path):
    strided = annotations().flip(1).transpose(1, 2).contiguous().transpose(1, 2)
    writer(tmp_path).write(strided)
    verify(tmp_path)
    assert torch.equal(opened(tmp_path).gather(range(N)), annotations().flip(1).half())
