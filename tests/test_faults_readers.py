"""Files and values that a reader cannot use: what users get wrong, and what the fuzzer found. One line each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captioning.cli.foreign_settings import evaluation_settings, resume_settings
from helpers import load_script, random_view, save_image
from helpers_faults import Fault, ends, faults
from helpers_runs import make_captions, make_run, save_checkpoint, tiny_config
from PIL import Image

from captioning.cli import export
from captioning.cli.build import build
from captioning.data import CaptionSource
from captioning.encoders import ConvEncoder, Encoder
from captioning.errors import InputError
from captioning.evaluation.files import pair, read_references, read_results
from captioning.evaluation.records import write_evaluation
from captioning.inference import DecodingOptions, load
from captioning.inference.caption import figure_suffix
from captioning.vocabulary import Vocabulary


def says(fault: Fault, run: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(InputError) as caught:
        run(*args)
    assert fault.sees in str(caught.value)


def put(path: Path, content: Any) -> Path:
    """Write a text, bytes or plain data as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


# Vocabularies, vectors, captions to score

FILES: dict[Fault, tuple[Any, Callable[[Path], Any]]] = {
    Fault("a vocabulary with a word twice", "words must be distinct"): ({"words": ["a", "a"]}, Vocabulary.load),
    Fault("a vocabulary with a special token", "got ['<end>'] twice"): ({"words": ["<end>"]}, Vocabulary.load),
    Fault("a vocabulary with a number", "words must be texts, got 3"): ({"words": ["a", 3]}, Vocabulary.load),
    Fault("a results file without results", "no results, expected"): ([], read_results),
    Fault("two captions of one image to score", "image_id 1 has a caption already"): (
        [{"image_id": 1, "caption": "x"}] * 2,
        read_results,
    ),
    Fault("a result without an image", "entry 0 has no image_id"): ([{"caption": "x"}], read_results),
    Fault("a caption of an image without references", "1 of 1 images have no references, among them image_id 7"): (
        [{"image_id": 7, "caption": "x"}],
        lambda path: pair(read_results(path), {1: [["x"]]}, where=path),
    ),
    Fault("references without a word", "holds no caption"): (
        {"annotations": [{"image_id": 1, "caption": "."}]},
        read_references,
    ),
    Fault("references of another kind", "no references, expected COCO's annotations or Karpathy's images"): (
        {"captions": []},
        read_references,
    ),
}


@faults(FILES)
def test_a_file_of_words_that_cannot_be_used_is_named(tmp_path, fault, case):
    content, read = case
    path = put(tmp_path / "x.json", content)
    says(fault, read, path)


# Images that are handed over, and how they are captioned


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("run") / "best.ckpt")


GIVEN: dict[Fault, Any] = {
    Fault("an image that does not exist", "no such image file"): "nope.png",
    Fault("a number in place of an image", "images: an image is"): 3,
    Fault("an array of another shape", "array must be"): np.zeros((2, 3, 4, 5), np.uint8),
    Fault("an array of whole numbers beyond 8 bits", "array must be uint8"): np.zeros((9, 9, 3), np.int64),
    Fault("an array beyond 0 .. 1", "array of float32 must lie in 0 .. 1, got 0 to 255"[:33]): np.full(
        (9, 9, 3), 255, np.float32
    ),
    Fault("a tensor that is not finite", "must lie in 0 .. 1, got nan"): torch.full((3, 9, 9), float("nan")),
    Fault("bytes that are no image", "5 bytes that are no image file"): b"hello",
    Fault(
        "an address that was not to be fetched", "is an address; save the image as a file"
    ): "https://example.org/x.png",
    Fault("an image of floating-point pixels", "floating point pixels have no defined white"): Image.new("F", (9, 9)),
}


@faults(GIVEN)
def test_what_is_no_image_is_said_to_be_none(checkpoint, tmp_path, monkeypatch, fault, case):
    monkeypatch.chdir(tmp_path)
    says(fault, load(checkpoint), case)


@faults(
    {
        Fault("a device that does not exist", "device 'toaster' is not known; use cpu or cuda"): "toaster",
        Fault("a GPU that does not exist", "CUDA devices; use cpu"): "cuda:99",
        Fault("a device that computes nothing", "device meta: is not one that captions"): "meta",
    }
)
def test_a_device_that_cannot_be_used_is_named(checkpoint, fault, case):
    says(fault, load, checkpoint, case)


@faults(
    {
        Fault("a temperature without sampling", "temperature=2.0 has an effect only when sampling"): {
            "temperature": 2.0
        },
        Fault("a method of decoding that does not exist", "method must be beam, greedy or sample, got 'x'"): {
            "method": "x"
        },
    }
)
def test_options_that_do_not_go_together_are_named(fault, case):
    says(fault, lambda: DecodingOptions(**case))


@faults({Fault("an overlay of another kind of file", "a figure's file must end in"): "x.txt"})
def test_a_figure_has_a_known_kind_of_file(fault, case):
    says(fault, figure_suffix, case)


# Exported folders

EXPORTS: dict[Fault, Callable[[Path], Any]] = {
    Fault("an exported folder without its vocabulary", "vocabulary.json: cannot be read"): (
        lambda folder: (folder / "vocabulary.json").unlink()
    ),
    Fault("exported weights cut short", "model.safetensors: damaged ("): lambda folder: put(
        folder / "model.safetensors", (folder / "model.safetensors").read_bytes()[:-9]
    ),
    Fault("an exported config whose settings are a list", "does not describe a model"): lambda folder: put(
        folder / "config.json", json.loads((folder / "config.json").read_text()) | {"settings": ["x"]}
    ),
    Fault("an exported config whose search is a text", "beam_size must be a whole number, got 'x'"): lambda folder: put(
        folder / "config.json",
        json.loads((folder / "config.json").read_text()) | {"settings": {"model": {"search": {"beam_size": "x"}}}},
    ),
    Fault("an exported config of another kind", "is not what captioning export writes"): lambda folder: put(
        folder / "config.json", []
    ),
    Fault("an exported config without an encoder", "has no 'encoder'; it is damaged or was edited"): lambda folder: put(
        folder / "config.json",
        {k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k != "encoder"},
    ),
    Fault("an exported vocabulary of other words", "its weights do not fit the model it describes"): lambda folder: put(
        folder / "vocabulary.json", {"words": ["a"]}
    ),
}


@faults(EXPORTS)
def test_an_exported_folder_that_cannot_be_used_is_named(checkpoint, tmp_path, capsys, fault, case):
    folder = tmp_path / "e"
    export.main(["--model", str(checkpoint), "--output", str(folder)])
    case(folder)
    names = [name for name in ("model.safetensors", "config.json", "vocabulary.json") if (folder / name).exists()]
    sums = (f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    (folder / "SHA256SUMS").write_text("".join(sums))  # as somebody who edits it on purpose
    says(fault, load, folder)


# Studies and settings


def test_null_is_refused_where_a_components_argument_does_not_take_it():
    """A component's class has a metaclass, which hides its arguments from ``inspect.signature``."""
    encoder = {"class_path": "captioning.encoders.ConvEncoder", "init_args": {"channels": [6, 8], "strides": None}}
    with pytest.raises(InputError, match=r"model\.encoder\.init_args\.strides: must not be null"):
        build({"model.encoder": Encoder}, [{"model": {"encoder": encoder}}])


def test_a_sent_folder_of_shapes_has_a_name():
    settings = {"model": {}, "data": {"source": shapes_with(root="a\0b")}}
    with pytest.raises(InputError, match=r"data\.source: root 'a\\x00b' is no name of a folder"):
        evaluation_settings(settings, "config.yaml")


def shapes_with(**arguments: Any) -> dict[str, Any]:
    return {"class_path": "captioning.data.ShapesSource", "init_args": arguments}


@faults(
    {
        Fault("null where a class takes none", "data.source.init_args.root: must not be null"): shapes_with(root=None),
        Fault("an argument of another kind", "train"): shapes_with(train="many"),
        Fault("a source that does not exist", "captioning.data.Nope is not a known CaptionSource"): {
            "class_path": "captioning.data.Nope"
        },
        Fault("a source with a NUL character", "data.source"): "a\0b",
    }
)
def test_a_source_that_cannot_be_built_is_named(fault, case):
    says(fault, build, {"data.source": CaptionSource}, [{"data": {"source": case}}])


@faults(
    {
        Fault("a YAML alias of itself in a text of a run's settings", "model.x"): "&a [*a]",
        Fault("an impossible date in a text of a run's settings", "model.x"): "2024-13-45",
    }
)
def test_texts_of_settings_are_looked_at_safely(fault, case):
    """They are refused where numbers are expected, and where a class is."""
    for place, name in (("search", "note"), ("", "encoder")):
        config = tiny_config(Path("shapes"))
        (config["model"][place] if place else config["model"])[name] = case
        with pytest.raises(InputError, match=rf"config\.yaml: model\.({place}\.)?{name}"):
            resume_settings(config, "config.yaml")


# Scripts


def compared(folder: Path) -> list[str]:
    make_run(folder / "a", captions=[], settings={})
    write_evaluation(folder / "a", "test", {"bleu4": 1.0}, list(make_captions(3).values()), search={})
    return [str(folder / "a")]


def exists(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


SCRIPTS: dict[Fault, tuple[str, Callable[[Path], list[str]]]] = {
    Fault("one run to compare", "give two or more runs to compare"): ("compare_runs", compared),
    Fault("a folder that is no run's", "not a run; it has none of config.yaml"): (
        "compare_runs",
        lambda folder: [*compared(folder), str(exists(folder))],
    ),
    Fault("a folder with one run alone, which is given already", "give two or more runs to compare"): (
        "compare_runs",
        lambda folder: [*compared(folder), str(folder)],
    ),
    Fault("a run that does not exist", "no such folder; give a run's folder"): (
        "compare_runs",
        lambda folder: [*compared(folder), str(folder / "nope")],
    ),
    Fault("references without captions to score", "--references goes with --captions"): (
        "evaluate",
        lambda folder: ["--model", "x.ckpt", "--references", "x.json"],
    ),
    Fault("captions to score without references", "--captions needs --references"): (
        "evaluate",
        lambda folder: ["--captions", "x.json"],
    ),
    Fault("a beam for captions that are given", "--beam_size goes with --model, not with --captions"): (
        "evaluate",
        lambda folder: ["--captions", "x.json", "--references", "y.json", "--beam_size", "3"],
    ),
    Fault("an overlay onto the image itself", "would replace", kept="the image"): (
        "caption_image",
        lambda folder: [
            str(save_image(folder / "x.png")),
            *("--model", str(save_checkpoint(folder / "x.ckpt")), "--overlay", str(folder / "x.png")),
        ],
    ),
    Fault("no image in a folder", "no image"): (
        "caption_image",
        lambda folder: [str(exists(folder)), "--model", str(save_checkpoint(folder / "x.ckpt"))],
    ),
}


@faults(SCRIPTS)
def test_what_scripts_cannot_work_with_is_named(tmp_path, capsys, fault, case):
    name, arguments = case
    ends(capsys, fault, load_script(name).main, arguments(tmp_path))


# What the fuzzer found besides


@faults({Fault("an encoder of a billion channels", "channels must be in 1 .. 4096, got 1000000000"): (4, 10**9)})
def test_an_encoder_is_refused_before_it_is_built(fault, case):
    says(fault, lambda: ConvEncoder(case, (2, 2), image_size=12))


@faults({Fault("a checkpoint said to lie on two disks", "the end of the checkpoint is missing"): 2})
def test_an_archive_of_several_parts_is_refused(checkpoint, tmp_path, fault, case):
    content = bytearray(checkpoint.read_bytes())
    locator = content.rindex(b"PK\x06\x07")  # of ZIP64
    content[locator + 16 : locator + 20] = case.to_bytes(4, "little")
    says(fault, load, put(tmp_path / "x.ckpt", bytes(content)))


@faults({Fault("a run's settings with a number for a name", "3 is not a name"): 3})
def test_names_of_settings_are_texts(fault, case):
    config = tiny_config(Path("shapes"))
    config["model"][case] = 1
    says(fault, resume_settings, config, "config.yaml")


def test_the_checkpoint_of_these_tests_captions_an_image(checkpoint):
    assert load(checkpoint)(random_view(20, 14)).words
