from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers import SCRIPTS
from helpers_runs import save_checkpoint
from PIL import Image

from captioning.cli import extract
from captioning.cli.build import build
from captioning.data import ShapesSource
from captioning.data.features import FeatureCache, FeatureWriter
from captioning.data.images import load_image
from captioning.data.records import CaptionIndex, CaptionSource, ImageEntry
from captioning.encoders import Encoder, TorchvisionEncoder
from captioning.errors import InputError
from captioning.settings import read_config

N = {"train": 5, "val": 3}


class TinySource(CaptionSource):
    def __init__(self, root: str, word: str = "dog") -> None:
        self.root, self.word = root, word

    def prepare(self) -> None:
        pass

    def index(self, split: str) -> CaptionIndex:
        entries = [ImageEntry(i, f"{split}{i}.jpg", [self.word]) for i in range(N[split])]
        return CaptionIndex.build(self.root, entries)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, n in N.items():
        for i in range(n):
            Image.fromarray(rng.integers(0, 256, (40, 50 + i, 3), dtype=np.uint8)).save(folder / f"{split}{i}.jpg")
    torch.manual_seed(0)
    torch.save(TorchvisionEncoder("resnet18", "relu", weights=None).network.state_dict(), folder / "weights.pth")
    return folder


@pytest.fixture
def config(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {
        "model": {
            "encoder": {
                "class_path": "captioning.encoders.TorchvisionEncoder",
                "init_args": {
                    "name": "resnet18",
                    "node": "relu",
                    "weights": str(root / "weights.pth"),
                    "image_size": 32,
                },
            }
        },
        "data": {
            "source": {"class_path": f"{__name__}.TinySource", "init_args": {"root": str(root)}},
            "batch_size": 64,
        },
    }


def run(config: dict[str, Any], tmp_path: Path, *options: str, out: str = "out") -> Path:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    common = ["--batch_size", "2", "--num_workers", "0", "--device", "cpu"]
    extract.main(["--config", str(tmp_path / "config.yaml"), "--output", str(tmp_path / out), *common, *options])
    return tmp_path / out


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


def encoder_of(config: dict[str, Any]) -> TorchvisionEncoder:
    return TorchvisionEncoder(**config["model"]["encoder"]["init_args"])


def test_the_cache_holds_what_the_encoder_computes(config, root, tmp_path, capsys):
    out = run(config, tmp_path)
    encoder = encoder_of(config)
    for split, n in N.items():
        cache = FeatureCache(out, split, encoder.fingerprint())
        images = [encoder.preprocessing(load_image(root / f"{split}{i}.jpg")) for i in range(n)]
        expected = encoder(torch.stack(images))
        assert cache.shape == (n, 256, 64)
        assert torch.allclose(cache.gather(range(n)).float(), expected, rtol=2**-10, atol=1e-4)
    printed = capsys.readouterr().out
    assert "train: 5 images x 256 locations x 64 x 2 bytes = 0.00 GB" in printed
    assert printed.index("GB free") < printed.index("train: complete")
    assert printed.splitlines()[-1].endswith(f"--data.features {out}")


def test_mirrored_training_images_are_written_beside_the_others_and_resume_too(config, tmp_path, capsys):
    out = run(config, tmp_path)
    before = contents(out)
    capsys.readouterr()
    run(config, tmp_path, "--flipped")
    printed = capsys.readouterr().out
    assert "train: 5 images x 256 locations x 64 x 2 bytes = 0.00 GB, 5 done already" in printed
    assert "train_flipped: complete" in printed and printed.rstrip().endswith(
        f"--data.features {out} --data.augmentation.flip 0.5"
    )
    after = contents(out)
    new = {"train_flipped.json", "train_flipped.images.json", "train_flipped/00000.npy"}
    assert after.keys() - before.keys() == new
    assert before.items() <= after.items()
    with pytest.raises(SystemExit):
        run(config, tmp_path, "--flipped", "--split", "val")
    assert "--flipped: only training images are mirrored" in capsys.readouterr().err


def test_workers_give_the_same_features(config, tmp_path):
    alone = run(config, tmp_path, "--split", "val")
    together = run(config, tmp_path, "--split", "val", "--num_workers", "2", out="together")
    assert contents(alone) == contents(together)
    assert not (alone / "train").exists()


@pytest.fixture
def small_shards(monkeypatch) -> None:
    """Two images a file."""
    monkeypatch.setattr("captioning.data.features.layout._SHARD_BYTES", 2 * 256 * 64 * 2)


@pytest.mark.usefixtures("small_shards")
def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(config, tmp_path, capsys, monkeypatch):
    whole = run(config, tmp_path, "--split", "train", out="whole")
    write = FeatureWriter.write

    def interrupted(self, annotations):
        if self.collected == 4:
            raise KeyboardInterrupt
        write(self, annotations)

    with monkeypatch.context() as patch:
        patch.setattr(FeatureWriter, "write", interrupted)
        with pytest.raises(SystemExit) as ended:
            run(config, tmp_path, "--split", "train", "--batch_size", "1")
    assert ended.value.code == 130
    assert "train: stopped at 4 of 5; the same command resumes here" in capsys.readouterr().out
    out = run(config, tmp_path, "--split", "train")
    assert "4 done already" in capsys.readouterr().out
    assert contents(out) == contents(whole)


@pytest.mark.usefixtures("small_shards")
def test_two_processes_divide_the_files(config, tmp_path, capsys):
    whole = run(config, tmp_path, out="whole")
    capsys.readouterr()
    out = run(config, tmp_path, "--shard", "1/2")
    assert "2 bytes = 0.00 GB, 2 of them here\n" in capsys.readouterr().out
    assert [path.name for path in sorted((out / "train").glob("*.npy"))] == ["00001.npy"]
    run(config, tmp_path, "--shard", "0/2")
    assert contents(out) == contents(whole)
    assert (
        max(len(content) for name, content in contents(out).items() if name.endswith(".npy")) == 128 + 2 * 256 * 64 * 2
    )


_SHARED = """
import runpy, sys
sys.argv = sys.argv[1:]
from captioning.data.features import layout
layout._SHARD_BYTES = 2 * 256 * 64 * 2
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_two_processes_write_one_cache_at_the_same_time(config, tmp_path):
    source = ShapesSource(str(tmp_path / "shapes"), train=21, val=2, test=1, image_size=48)
    source.prepare()
    config["data"]["source"] = {
        "class_path": "captioning.data.ShapesSource",
        "init_args": {"root": str(source.root), "train": 21, "val": 2, "test": 1, "image_size": 48},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))

    def start(out: str, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _SHARED, str(SCRIPTS / "extract_features.py"), "--config", "config.yaml"]
        command += ["--split", "train", "--output", out, "--batch_size", "2", "--num_workers", "0", "--device", "cpu"]
        return subprocess.Popen([*command, *options], cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    processes = [start("shared", "--shard", f"{number}/2") for number in range(2)]
    for process in (*processes, start("whole")):
        assert process.communicate(timeout=300)[1] in ("", "captioning extract: importing PyTorch ...\n")
        assert process.returncode == 0
    assert len(list((tmp_path / "shared/train").glob("*.npy"))) == 11
    assert contents(tmp_path / "shared") == contents(tmp_path / "whole")
    extract.main(["--output", str(tmp_path / "shared"), "--verify"])


@pytest.mark.parametrize("shard", ["2/2", "1", "a/b", "-1/2", "1/0"])
def test_an_impossible_shard_is_refused(config, tmp_path, capsys, shard):
    assert "expected I/N with I in 0 .. N - 1" in failing(config, tmp_path, capsys, f"--shard={shard}")


def test_a_disk_too_small_is_refused_before_the_start(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    assert "0.00 GB are needed and 0.00 GB are free; free some" in failing(config, tmp_path, capsys)
    assert not list((tmp_path / "out").iterdir())


def test_shards_are_verified_and_damaged_ones_written_again(config, tmp_path, capsys):
    out = run(config, tmp_path, "--flipped")
    verify = ["--output", str(out), "--verify"]
    extract.main(verify)
    assert "train_flipped: 1 shards were read\nval: 1 shards were read" in capsys.readouterr().out
    (out / "train_flipped/00000.npy").unlink()
    (out / "val/00000.npy").write_bytes((out / "val/00000.npy").read_bytes()[:-1])
    message = failing(config, tmp_path, capsys, *verify, config_file=False)
    assert "train_flipped/00000.npy: missing (damaged shards: 2)" in message and message.count("\n") == 1
    run(config, tmp_path, "--flipped")
    extract.main(verify)


def test_shards_whose_manifest_was_deleted_are_written_again(config, tmp_path):
    out = run(config, tmp_path)
    before = contents(out)
    (out / "train.json").unlink()
    run(config, tmp_path)
    assert contents(out) == before


def test_only_a_folder_of_features_is_verified(tmp_path, capsys):
    (tmp_path / "out/coco/train").mkdir(parents=True)  # a folder above the features
    assert "holds no features" in failing({}, tmp_path, capsys, "--verify", config_file=False)
    assert "--splt: has no effect with --verify" in failing(
        {}, tmp_path, capsys, "--verify", "--splt=a", config_file=False
    )


def test_what_an_encoder_says_of_its_arguments_is_one_line(config, tmp_path, capsys):
    options = [
        "--model.encoder.name",
        "vgg11",
        "--model.encoder.node",
        "features.19",
        "--model.encoder.image_size",
        "8",
    ]
    assert "TorchvisionEncoder: Given input size: (512x1x1)" in failing(config, tmp_path, capsys, *options)


def test_a_finished_cache_is_not_computed_again(config, tmp_path, monkeypatch):
    run(config, tmp_path)
    monkeypatch.setattr(FeatureWriter, "write", lambda *_: pytest.fail("computed again"))
    run(config, tmp_path)


def failing(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str, config_file: bool = True
) -> str:
    command = run if config_file else lambda *_: extract.main(["--output", str(tmp_path / "out"), *options])
    with pytest.raises(SystemExit) as ended:
        command(config, tmp_path, *options)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_unreadable_image_is_named_in_one_line(config, root, tmp_path, capsys, workers):
    copy = tmp_path / "images"
    copy.mkdir()
    for path in root.glob("*.jpg"):
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "train3.jpg").write_bytes(b"no image")
    message = failing(config, tmp_path, capsys, "--data.source.root", str(copy), "--num_workers", workers)
    assert message.count("\n") == 1
    assert "train3.jpg: cannot be read as an image" in message


def test_features_of_another_encoder_are_not_continued(config, tmp_path, capsys):
    run(config, tmp_path)
    message = failing(config, tmp_path, capsys, "--model.encoder.node", "bn1")
    assert "node 'relu' there, 'bn1' here" in message


def test_an_encoder_that_was_fine_tuned_is_taken_from_its_checkpoint(config, root, tmp_path, capsys):
    options = config["model"]["encoder"]["init_args"]
    tuned = TorchvisionEncoder(**options, trainable_from="conv1")
    with torch.no_grad():
        tuned.network.conv1.weight.neg_()
    checkpoint = save_checkpoint(tmp_path / "tuned.ckpt", with_encoder=tuned)
    out = run(config, tmp_path, "--init_from", str(checkpoint))
    frozen = TorchvisionEncoder(**options)
    frozen.load_state_dict(tuned.state_dict())
    images = torch.stack([frozen.preprocessing(load_image(root / f"val{i}.jpg")) for i in range(N["val"])])
    annotations = FeatureCache(out, "val", frozen.fingerprint()).gather(range(N["val"])).float()
    assert torch.allclose(annotations, frozen(images), rtol=2**-10, atol=1e-4)
    assert not torch.allclose(annotations, encoder_of(config)(images), atol=0.1)
    assert f"--init_from {checkpoint}" in capsys.readouterr().out

    options |= {"name": "vgg11", "node": "features.1", "weights": str(root / "missing.pth")}
    assert "its encoder is not that of the config" in failing(config, tmp_path, capsys, "--init_from", str(checkpoint))
    assert "none.ckpt" in failing(config, tmp_path, capsys, "--init_from", "none.ckpt")


def test_what_cannot_be_cached_is_refused(config, tmp_path, capsys):
    assert "trainable_from to null" in failing(config, tmp_path, capsys, "--model.encoder.trainable_from=conv1")
    assert "random weights" in failing(config, tmp_path, capsys, "--model.encoder.weights", "null")


@pytest.mark.parametrize(
    ("group", "change", "message"),
    [
        ("data", {}, "required: data.source"),
        ("data", [1], "required: data.source"),
        ("data", {"source": "os.system"}, "os.system is not a known CaptionSource"),
        ("model", {"encoder": {}}, '"model.encoder": .* class_path'),
        ("data", {"source": {"class_path": "os.system"}}, "os.system is not a known CaptionSource"),
        ("data", {"source": {"class_path": "captioning.data.records.No"}}, "records.No is not a known CaptionSource"),
        ("data", {"source": {"class_path": "captioning.data.CaptionIndex"}}, "CaptionIndex is not a known Caption"),
        ("data", {"source": {"class_path": f"{__name__}.TinySource"}}, "TinySource': .*required: root"),
        ("model", {"encoder": {"class_path": "os.system"}}, "os.system is not a known Encoder"),
    ],
)
def test_mistakes_in_the_configuration_are_named(config, tmp_path, capsys, group, change, message):
    line = failing({**config, group: change}, tmp_path, capsys)
    assert re.search(message, line), line
    assert line.count("\n") == 1


def test_a_configuration_must_be_given(config, tmp_path, capsys):
    assert "--config: name the training YAML" in failing(config, tmp_path, capsys, config_file=False)


def test_missing_and_broken_configurations_are_named(tmp_path):
    with pytest.raises(InputError, match=r"gone\.yaml: cannot be read"):
        read_config(tmp_path / "gone.yaml")
    for text, message in (("a: [", "not a YAML file"), ("- 1", "not a configuration")):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(InputError, match=rf"bad\.yaml: {message}"):
            read_config(tmp_path / "bad.yaml")


def test_later_configurations_and_options_win():
    def source(options=(), **values):
        first = {"class_path": "captioning.data.ShapesSource", "init_args": {"root": "a", "train": 1, "val": 2}}
        configs = [
            {"data": {"source": first, "batch_size": 3}, "trainer": {"devices": 1}},
            {"data": {"source": values}},
        ]
        (built,) = build({"data.source": CaptionSource}, configs, options)
        return built

    later = source(init_args={"val": 5})
    assert (later.root, later.images["train"], later.images["val"]) == (Path("a"), 1, 5)
    options = source(["--data.source.train", "7", "--data.source.init_args.seed=4"], init_args={"val": 5})
    assert (options.images["train"], options.images["val"], options.seed) == (7, 5, 4)
    other = source(class_path="captioning.data.CocoSource", init_args={"year": 2014})
    assert (type(other).__name__, other.year) == ("CocoSource", 2014)
    with pytest.raises(InputError, match=r"batch_size\.x"):
        source(["--data.batch_size.x", "1"])


@pytest.mark.parametrize("where", ["source", "model_args", "nested"])
def test_a_configuration_constructs_nothing_foreign(tmp_path, where):
    mark = tmp_path / "ran"
    foreign = {"class_path": "os.system", "init_args": {"command": f"touch {mark}"}}
    encoder = {"name": "resnet18", "node": "relu", "model_args": {"norm_layer": foreign}}
    if where == "nested":
        encoder["model_args"] = {"norm_layer": [{"deeper": foreign}]}
    part = (
        foreign
        if where == "source"
        else {"class_path": "captioning.encoders.TorchvisionEncoder"} | {"init_args": encoder}
    )
    place, kind = ("data.source", CaptionSource) if where == "source" else ("model.encoder", Encoder)
    group, name = place.split(".")
    with pytest.raises(InputError, match=r"os\.system is not a known"):
        build({place: kind}, [{group: {name: part}}])
    assert not mark.exists()


@pytest.mark.parametrize(
    "options", [["--wat", "3"], ["--model.encoder.weights"], ["--data.x", "--data.y", "3"], ["stray"]]
)
def test_unknown_options_are_refused(config, tmp_path, capsys, options):
    message = failing(config, tmp_path, capsys, *options)
    assert options[0] in message


def test_help_is_quick_to_import():
    path = str(SCRIPTS / "extract_features.py")
    code = f"import sys, runpy; sys.argv = ['x', '--help']; runpy.run_path({path!r}, run_name='__main__')"
    program = (
        f"import sys\ntry:\n    exec({code!r})\nfinally:\n"
        "    slow = {'torch', 'torchvision', 'timm', 'PIL'} & set(sys.modules)\n    assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--output" in done.stdout
