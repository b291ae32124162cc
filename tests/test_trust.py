"""A model file may come from anyone: opening it runs no code, and reads and writes no other file."""

import functools
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import save_image
from helpers_faults import command, refusal
from helpers_runs import edit_checkpoint, save_checkpoint, tiny_config

from captioning.checkpoint.load import read_model
from captioning.checkpoint.model_card import model_card
from captioning.encoders import EfficientNetLite2, TimmEncoder
from captioning.errors import InputError, printable
from captioning.inference import load

SHELL = {"class_path": "os.system", "init_args": {"command": "touch marker"}}
PAYLOAD = {"class_path": "payload.Payload", "init_args": {}}


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    """A working directory with a photo, a checkpoint, and a module whose import writes the file ``marker``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("payload.py").write_text("open('marker', 'w')\nclass Payload: pass\n")
    save_image(tmp_path / "photo.png")
    save_checkpoint(tmp_path / "sent.ckpt")
    return tmp_path


def put(settings: dict[str, Any], key: str, value: Any) -> None:
    """Set the value at a dotted key such as "decoder.init_args.attention"."""
    *groups, name = key.split(".")
    functools.reduce(dict.__getitem__, groups, settings)[name] = value


def as_sent(kind: str, edit: Callable[[dict[str, Any]], Any]) -> str:
    """Return a checkpoint, or an exported folder, whose settings ``edit`` has changed."""
    if kind == "checkpoint":
        edit_checkpoint("sent.ckpt", lambda content: edit(content["captioning"]))
        return "sent.ckpt"
    load("sent.ckpt").export("sent")
    content = json.loads(Path("sent/config.json").read_text())
    edit(content)
    Path("sent/config.json").write_text(json.dumps(content))
    return "sent"


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
@pytest.mark.parametrize("value", [SHELL, PAYLOAD, "payload.Payload"], ids=["shell", "module", "text"])
@pytest.mark.parametrize(
    "where",
    [
        *("encoder", "decoder", "tokenizer", "decoder.init_args.attention", "decoder.init_args.output"),
        *("decoder.init_args.attention.init_args.score", "encoder.init_args.channels"),
    ],
)
def test_a_class_that_is_no_known_component_is_not_imported(workdir, capsys, where, value, kind):
    model = as_sent(kind, lambda content: put(content, where, value))
    assert refusal(capsys, "caption", "photo.png", "--model", model).startswith(f"error: {model}: ")
    assert not Path("marker").exists()


@pytest.mark.parametrize("value", [SHELL, PAYLOAD], ids=["shell", "module"])
def test_settings_of_training_are_not_constructed(workdir, capsys, value):
    settings = {
        "model": {"optimizer": value, "scheduler": value, "objective": value, "encoder": value},
        "trainer": {"callbacks": [value], "logger": value, "default_root_dir": "elsewhere"},
        "data": {"source": value, "vocabulary": {"tokenizer": value}},
        "checkpoint": {"filename": "../../elsewhere"},
    }
    model = as_sent("checkpoint", lambda content: content.update(settings=settings))
    command("caption", "photo.png", "--model", model)
    command("export", "--model", model, "--output", "passed_on")
    command("caption", "photo.png", "--model", "passed_on")
    first, _, second = capsys.readouterr().out.strip().splitlines()
    assert first == second and not Path("marker").exists() and not Path("elsewhere").exists()


class Pickled:
    def __reduce__(self):
        return os.system, ("touch marker",)


@pytest.mark.parametrize("where", ["extra", "captioning", "state_dict"])
def test_a_pickle_does_not_run(workdir, capsys, where):
    content = torch.load("sent.ckpt", weights_only=True)
    content[where] = Pickled()
    torch.save(content, "sent.ckpt")
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny_config(Path("shapes"))))
    training = ["--config", "tiny.yaml", "--ckpt_path"]
    for words in (["caption", "photo.png", "--model"], ["fit", *training], ["test", *training]):
        assert "sent.ckpt: not a checkpoint of this project" in refusal(capsys, *words, "sent.ckpt")
    torch.save(Pickled(), "sent.ckpt")
    with pytest.raises(InputError, match=r"sent\.ckpt: not a checkpoint of this project"):
        load("sent.ckpt")
    assert not Path("marker").exists()


def test_a_path_in_a_setting_is_neither_read_nor_written(workdir):
    """A new run reads the published weights of its encoder; opening a checkpoint does not."""
    save_checkpoint(Path("sent.ckpt"), with_encoder=EfficientNetLite2(weights=None, image_size=64))
    os.mkfifo("pipe")  # reading it would wait forever
    before = sorted(os.listdir())
    for weights in ("pipe", str(workdir / "elsewhere/weights.safetensors"), "https://example.org/weights"):
        edit_checkpoint("sent.ckpt", lambda content: put(content["captioning"], "encoder.init_args.weights", weights))  # noqa: B023
        assert set(load("sent.ckpt").caption("photo.png", max_length=3).words) is not None
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    "model_args",
    [
        {"checkpoint_path": "missing.safetensors"},
        {"pretrained": True, "pretrained_cfg_overlay": {"file": "missing.safetensors"}},
        {"pretrained": True, "pretrained_cfg_overlay": {"url": "https://example.org/x.pth", "hf_hub_id": None}},
    ],
)
def test_weights_that_a_timm_encoder_names_are_not_downloaded(workdir, model_args):
    pytest.importorskip("timm")
    encoder = TimmEncoder("mobilenetv3_small_050", weights=None, image_size=64)
    save_checkpoint(Path("sent.ckpt"), with_encoder=encoder)
    as_sent("checkpoint", lambda content: put(content, "encoder.init_args.model_args", model_args))
    with pytest.raises(InputError, match=r"TimmEncoder: model_args: \w+ is not allowed"):
        load("sent.ckpt")


def test_text_of_a_model_file_is_escaped(workdir, capsys):
    """In printed captions, in the page of the explorer and in the model card."""
    words = ["{{7*7}}", "</script><script>", "\x1b[31mred", "{name.__class__}", "%s", "a", "b"]
    edit_checkpoint("sent.ckpt", lambda content: content["captioning"].update(vocabulary=words))
    command("caption", "photo.png", "--model", "sent.ckpt", "--explorer", "page.html")
    out = capsys.readouterr().out
    assert "\x1b" not in out and out.count("\n") == 1
    page, caption = Path("page.html").read_text(), load("sent.ckpt")("photo.png")
    assert out.strip() == printable(caption.text)
    assert "</script><script>" not in page and ("{{7*7}}" in page or "{{7*7}}" not in caption.text)
    model = read_model("sent.ckpt")
    settings = {"data": {"source": {"class_path": "{name.__class__} {0} {{7*7}}"}}}
    assert "Data: {name.__class__} {0} {{7*7}}." in model_card(model.captioner, model.vocabulary, settings, "sent")


HUGE = {
    "hidden_dim must be in 1 .. 65536": {"hidden_dim": 10**12},
    "memory": {"embedding_dim": 65_536, "hidden_dim": 65_536},
    "size mismatch": {"hidden_dim": 70},
}


@pytest.mark.parametrize("message", HUGE)
def test_a_tensor_of_a_huge_shape_is_one_line(workdir, capsys, message):
    edit_checkpoint("sent.ckpt", lambda content: content["captioning"]["decoder"]["init_args"].update(HUGE[message]))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (32 << 30, limits[1]))  # bytes, also where the machine has more
    try:
        assert message in refusal(capsys, "caption", "photo.png", "--model", "sent.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
