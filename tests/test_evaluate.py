"""Scoring a checkpoint on a data set that it was not trained on, and where attention looked there."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers_runs import tiny_config
from PIL import Image

from captioning.cells import CellGrid
from captioning.cli import evaluate, export
from captioning.cli.fit import main
from captioning.data.objects import GroundedObject
from captioning.encoders import Encoder
from captioning.errors import InputError
from captioning.evaluation.grounding import noun_hits, object_cells
from captioning.inference import load
from captioning.vocabulary import END, START

CHECKPOINT = "runs/tiny/checkpoints/last.ckpt"
AS_LOADED = ["--trainer.precision", "32-true"]  # `load` computes in float32
# (file, (top, bottom, left, right) of a dog, captions)
PICTURES = [
    ("a.png", (0, 24, 0, 12), ["a dog and a puppy", "two dogs eat a hot dog"]),
    ("b.png", (30, 48, 24, 48), ["a red circle beside a dog"]),
]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Iterator[Path]:
    """A run on shapes, and two pictures with captions and a mask in COCO's layout; entered."""
    folder = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["evaluate.py"])
        prepare(folder)
        yield folder


def prepare(folder: Path) -> None:
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny_config(folder / "shapes", limit_images=1)))
    main(["fit", "--config", "tiny.yaml"])
    for name in ("coco/annotations", "coco/val2017"):
        Path(name).mkdir(parents=True)
    images, captions, objects = [], [], []
    for number, (name, (top, bottom, left, right), texts) in enumerate(PICTURES):
        pixels = np.random.default_rng(number).integers(0, 255, (48, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"coco/val2017/{name}")
        images.append({"id": number, "file_name": name, "height": 48, "width": 48})
        outline = [left, top, right, top, right, bottom, left, bottom]
        objects.append({"id": number, "image_id": number, "category_id": 18, "segmentation": [outline], "iscrowd": 0})
        captions += [{"id": len(captions) + i, "image_id": number, "caption": text} for i, text in enumerate(texts)]
    categories = [{"id": 18, "name": "dog"}]
    for kind, entries in (("captions", captions), ("instances", objects)):
        content = {"images": images, "annotations": entries, "categories": categories}
        Path(f"coco/annotations/{kind}_val2017.json").write_text(json.dumps(content))
        Path(f"coco/annotations/{kind}_train2017.json").write_text(json.dumps(content))
    overlay = {"data": {"source": {"class_path": "captioning.data.coco.CocoSource", "init_args": {"root": "coco"}}}}
    Path("pets.yaml").write_text(yaml.safe_dump(overlay | {"trainer": {"max_epochs": 99}}))


def test_checkpoint_is_scored_on_another_data_set_with_its_own_vocabulary(workdir, capsys, monkeypatch):
    by_hand = CellGrid((6, 6), (0.5, 0.5), (8.0, 8.0), (48, 48))
    monkeypatch.setattr(Encoder, "cells", property(lambda encoder: by_hand))
    main(["test", "--ckpt_path", CHECKPOINT])
    own = Path("runs/tiny/test_metrics.json").read_bytes()
    capsys.readouterr()
    evaluate.main(["--model", CHECKPOINT, "--split", "val", "--data", "pets.yaml", "--json", "measured.json"])
    printed = capsys.readouterr().out
    assert "val split, 2 images" in printed and "correctness     uniform      centre" in printed
    assert Path("runs/tiny/test_metrics.json").read_bytes() == own
    captions = json.loads(Path("runs/tiny/pets/test_captions.json").read_text())
    assert [caption["references"] for caption in captions] == [texts for _, _, texts in PICTURES]
    written = json.loads(Path("measured.json").read_text())
    assert written["grounded_nouns"] == {"generated": 0, "references": 4}  # a model of shapes never says dog
    # 6 x 6 cells of 8 pixels, the first centred at 0.5, so half of it is in view: shares of rows times columns.
    first, second = (3 + 3.5 / 8) * (1 + 7.5 / 8), (1 + 6.5 / 8) * (2 + 4.5 / 8)
    expected = 100 * (3 * first + second) / (4 * 36)
    assert written["values"]["reference_correctness_uniform"] == pytest.approx(expected, abs=1e-3)
    assert written["settings"]["data"]["source"]["class_path"].endswith("CocoSource")
    assert written["settings"]["data"]["vocabulary"]["file"] is None and written["settings"]["max_epochs"] == 1


def test_references_are_judged_at_their_own_words_under_teacher_forcing(workdir):
    evaluate.main(["--model", CHECKPOINT, "--split", "val", "--data", "pets.yaml", *AS_LOADED])
    captions = json.loads(Path("runs/tiny/pets/test_captions.json").read_text())
    model = load(CHECKPOINT)
    for (name, (top, bottom, left, right), texts), entry in zip(PICTURES, captions, strict=True):
        mask = np.zeros((48, 48), dtype=bool)
        mask[top:bottom, left:right] = True
        dog = GroundedObject("dog", frozenset({"dogs", "puppy"}), frozenset(), mask, frozenset({"hot dog"}))
        cells = object_cells([dog], model.encoder.cells)
        expected = []
        for text in texts:
            expected += noun_hits(text.split(), alphas_of(model, f"coco/val2017/{name}", text), cells)
        found = entry["reference_hits"]
        assert [(hit["step"], hit["noun"]) for hit in found] == [(hit.step, hit.noun) for hit in expected]
        assert [hit["correctness"] for hit in found] == pytest.approx([h.correctness for h in expected], abs=1e-5)
        assert [hit["noun"] for hit in found] in (["dog", "puppy", "dogs"], ["dog"])


def test_several_checkpoints_are_scored_as_an_ensemble_beside_the_files_of_the_first(workdir, capsys):
    """The second model's encoder sees the images otherwise, so its views are loaded beside the batches."""
    main(["test", "--ckpt_path", CHECKPOINT])
    own = Path("runs/tiny/test_metrics.json").read_bytes()
    other = ["--seed_everything", "5", "--model.encoder.init_args.image_size", "64", "--name", "other"]
    main(["fit", "--config", "tiny.yaml", *other])
    both = [CHECKPOINT, "runs/other/checkpoints/last.ckpt"]
    evaluate.main([*(f"--model={each}" for each in both), "--split", "val", "--json", "both.json", *AS_LOADED])
    assert "1 images; 2 models; beam 1" in capsys.readouterr().out
    assert Path("runs/tiny/test_metrics.json").read_bytes() == own
    (caption,) = json.loads(Path("runs/tiny/ensemble/test_captions.json").read_text())
    (image,) = sorted(Path("shapes").rglob("val*/*.png"))[:1]
    found = load(both).caption(image, beam_size=1)
    assert caption["caption"] == found.text and caption["log_prob"] == pytest.approx(found.log_prob, rel=1e-5)
    alone = [load(each).caption(image, beam_size=1).log_prob for each in both]
    assert caption["log_prob"] not in [pytest.approx(score, rel=1e-4) for score in alone]
    measured = json.loads(Path("both.json").read_text())
    assert measured["search"]["ensemble"] == both
    nll = [evaluate_nll("--model", checkpoint) for checkpoint in both]
    assert measured["values"]["nll"] < sum(nll) / 2  # Jensen: the mean of probabilities beats the mean of logarithms


def evaluate_nll(*arguments: str) -> float:
    evaluate.main([*arguments, "--split", "val", "--json", "one.json", *AS_LOADED])
    return json.loads(Path("one.json").read_text())["values"]["nll"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "--config", "tiny.yaml", "--ensemble", f'["{CHECKPOINT}"]'], "--ensemble: models are trained one by"),
        (["test", "--ckpt_path", CHECKPOINT, "--ensemble", '["nowhere.ckpt"]'], "nowhere.ckpt: the checkpoint cannot"),
    ],
)
def test_an_ensemble_that_cannot_be_is_refused(workdir, arguments, message):
    with pytest.raises(InputError, match=message):
        main(arguments)


def test_an_exported_model_is_scored_as_its_checkpoint_is_and_its_folder_stays_as_it_is(workdir, capsys):
    export.main(["--model", CHECKPOINT, "--output", "exported"])
    files = {path: path.read_bytes() for path in Path("exported").iterdir()}
    capsys.readouterr()
    evaluate.main(["--model", "exported", "--split", "val", "--device", "cpu", "--json", *AS_LOADED])
    out, err = capsys.readouterr()
    assert json.loads(out)["values"]["nll"] == evaluate_nll("--model", CHECKPOINT)  # JSON alone, without FILE
    assert "val split, 1 images" in err and "BLEU-4" in err
    assert {path: path.read_bytes() for path in Path("exported").iterdir()} == files


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "--device tpu: is not known"),
        (["--device", "cpu:0"], "--device cpu:0: is not known"),
        (["--model", "hf:nobody"], "hf:nobody"),
        (["--ckpt_path", CHECKPOINT], "--ckpt_path: is an option of captioning test; name the models with --model"),
        (["--beamsize=3"], "--beamsize: no such option; did you mean --beam_size?"),
    ],
)
def test_options_that_cannot_be_used_are_one_line(workdir, capsys, options, message):
    with pytest.raises(SystemExit):
        evaluate.main(["--model", CHECKPOINT, *options])
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_settings_without_what_a_measurement_names_are_refused_before_scoring(workdir, capsys):
    content = torch.load(CHECKPOINT, weights_only=True)
    del content["captioning"]["settings"]["trainer"]["max_epochs"]
    torch.save(content, "edited.ckpt")
    with pytest.raises(SystemExit) as caught:
        evaluate.main(["--model", "edited.ckpt"])
    assert caught.value.code == 2
    assert "error: edited.ckpt: its settings lack 'max_epochs'" in capsys.readouterr().err


@torch.inference_mode()
def alphas_of(model, path: str, text: str) -> np.ndarray:
    """(T, L), one step of the decoder after the other."""
    memory = model.model.encode(model.encoder.preprocessing(Image.open(path))[None])
    step, state = model.model.stepper(memory), model.model.decoder.init_state(memory)
    rows = []
    for token in [START, *model.vocabulary.encode(text.split())]:
        looked = step(torch.tensor([token]), state)
        state = looked.state
        rows.append(looked.trace.alphas[0].numpy())
    assert END not in model.vocabulary.encode(text.split())
    return np.stack(rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {max_epochs: 1}", r"--data other.yaml: names no data.source"),
        ("data: {batch_size: 1}", r"--data other.yaml: names no data.source"),
        ("[unclosed", r"--data other.yaml: not a YAML file"),
        (None, r"--data other.yaml: cannot be read \(No such file or directory\)"),
    ],
)
def test_a_file_without_a_data_set_is_refused_by_name(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("other.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        evaluate._data_overlay(Path("other.yaml"), tmp_path)
