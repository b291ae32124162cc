"""`captioning extract`: the encoder and data of training configurations, and options that win over them."""

import json
from pathlib import Path

import pytest
import yaml
from helpers_faults import command, refusal
from helpers_runs import save_checkpoint

from captioning.cli.build import build
from captioning.data import CaptionSource
from captioning.data.shapes import ShapesSource
from captioning.encoders import Encoder, TorchvisionEncoder
from captioning.errors import InputError

COUNTS = {"train": 4, "val": 2, "test": 1}
ENCODER = {"name": "squeezenet1_1", "node": "features.4", "weights": None, "image_size": 48}


@pytest.fixture(autouse=True)
def workdir(tmp_path, monkeypatch) -> Path:
    """A working directory with a configuration: an encoder with random weights, and a few shapes."""
    monkeypatch.chdir(tmp_path)
    ShapesSource("shapes", image_size=48, **COUNTS).prepare()
    source = {"class_path": "captioning.data.ShapesSource", "init_args": {"root": "x", "image_size": 48, **COUNTS}}
    parts = {"encoder": {"class_path": "TorchvisionEncoder", "init_args": ENCODER}, "search": {"beam_size": 7}}
    Path("config.yaml").write_text(yaml.safe_dump({"model": parts, "data": {"source": source}, "trainer": {}}))
    return tmp_path


OPTIONS = ["--config", "config.yaml", "--data.source.root", "shapes"]


def extracted(*options: object) -> dict[str, int]:
    """Run ``extract`` and return the number of images by split."""
    command("extract", *OPTIONS, "--output", "out", "--num_workers", 0, "--device", "cpu", *options)
    return {path.stem: len(json.loads(path.read_text())["paths"]) for path in Path("out").glob("*.json")}


def test_features_of_the_configured_splits_are_written_and_the_next_command_is_said(capsys):
    checkpoint = save_checkpoint(Path("tuned.ckpt"), with_encoder=TorchvisionEncoder(**ENCODER))
    assert extracted("--flipped", "--init_from", checkpoint) == {"train": 4, "val": 2, "train_flipped": 4}
    advice = "add to the training command:  --data.features out --data.augmentation.flip 0.5 --init_from tuned.ckpt"
    assert advice in capsys.readouterr().out
    other = save_checkpoint(Path("other.ckpt"))
    line = refusal(capsys, "extract", *OPTIONS, "--output", "new", "--init_from", other)
    assert "other.ckpt: its encoder is not the config's" in line


def test_limit_images_extracts_the_first_images_alone():
    assert extracted("--data.limit_images", 1) == {"train": 1, "val": 1}


def test_a_dotted_key_of_a_configuration_is_read_as_in_fit():
    Path("few.yaml").write_text("data.limit_images: 1\n")
    assert extracted("--config", "few.yaml", "--split", "val") == {"val": 1}


def test_null_in_a_later_configuration_resets_a_setting():
    Path("few.yaml").write_text("data: {limit_images: 1}\n")
    Path("all.yaml").write_text("data: {limit_images: null, vocabulary: null}\n")
    assert extracted("--config", "few.yaml", "--config", "all.yaml") == {"train": 4, "val": 2}


def test_the_value_of_an_option_of_the_configuration_may_have_spaces():
    Path("shapes").rename("my shapes")
    command("extract", "--config", "config.yaml", "--data.source.root=my shapes", "--output", "out", "--num_workers", 0)
    assert Path("out/train.json").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.encoder.trainable_from", "features.3", "--init_from", "tuned.ckpt"], "set trainable_from to null"),
        (["--init_from", "gone.ckpt"], "gone.ckpt: the checkpoint cannot be read"),
        (["--data.batch_size", "3"], "--data.batch_size 3; captioning fit has it"),
        (["--data.limit_images", "0"], "limit_images must be at least 1, got 0"),
        (["--data.source", "os.system"], "name its module by --import"),
        (["--split", "val", "--flipped"], "--flipped: mirrors the training images; add train to --split"),
    ],
)
def test_a_mistake_in_extract_is_one_line(capsys, options, message):
    save_checkpoint(Path("tuned.ckpt"), with_encoder=TorchvisionEncoder(**ENCODER))
    line = refusal(capsys, "extract", *OPTIONS, "--output", "out", *options)
    assert message in line and not list(Path().glob("out/*"))


def test_later_configurations_and_options_win():
    def source(options=(), **values):
        first = {"class_path": "captioning.data.ShapesSource", "init_args": {"root": "a", "train": 1, "val": 2}}
        configs = [
            {"data": {"source": first, "batch_size": 3}, "trainer": {"devices": 1}},
            {"data": {"source": values}},
        ]
        return build({"data.source": CaptionSource}, configs, options)[0]["data.source"]

    later = source(init_args={"val": 5})
    assert (later.images["train"], later.images["val"]) == (1, 5)
    options = source(["--data.source.train", "7", "--data.source.init_args.seed=4"], init_args={"val": 5})
    assert (options.images["train"], options.images["val"], options.seed) == (7, 5, 4)
    other = source(class_path="captioning.data.CocoSource", init_args={"year": 2014})
    assert (type(other).__name__, other.year) == ("CocoSource", 2014)


@pytest.mark.parametrize("where", ["source", "model_args"])
def test_extract_imports_no_class_of_a_configuration(tmp_path, where):
    foreign = {"class_path": "os.system", "init_args": {"command": f"touch {tmp_path / 'ran'}"}}
    encoder = {"name": "resnet18", "weights": None, "model_args": {"dropout": foreign}}
    parts = (
        {"data": {"source": foreign}}
        if where == "source"
        else {"model": {"encoder": {"class_path": "TimmEncoder", "init_args": encoder}}}
    )
    with pytest.raises(InputError):
        build({"data.source": CaptionSource} if where == "source" else {"model.encoder": Encoder}, [parts])
    assert not (tmp_path / "ran").exists()
