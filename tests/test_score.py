"""`captioning test` of a model on data that it was not trained on, and of an ensemble."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from helpers_faults import command, refusal
from helpers_runs import tiny_config
from PIL import Image

from captioning.decoding import BeamOptions
from captioning.inference import load
from captioning.run_folder import checksum

CHECKPOINT = "runs/tiny/checkpoints/last.ckpt"
OTHER = "runs/other/checkpoints/last.ckpt"
VAL = ["--split", "val", "--precision", "32-true"]  # `load` computes in float32
# (file, (top, bottom, left, right) of a dog, captions)
PICTURES = [
    ("a.png", (0, 24, 0, 12), ["a dog and a puppy", "two dogs eat a hot dog"]),
    ("b.png", (30, 48, 24, 48), ["a red circle beside a dog"]),
]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Iterator[Path]:
    """A working directory with two runs on shapes, and two images with captions and a mask in COCO's layout."""
    folder = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("tiny.yaml").write_text(yaml.safe_dump(tiny_config(folder / "shapes", limit_images=1)))
        command("fit", "--config", "tiny.yaml")
        other = ["--seed_everything", 5, "--model.encoder.init_args.image_size", 64, "--name", "other"]
        hard = ["--model.decoder.attention", "captioning.attention.HardAttention"]
        command("fit", "--config", "tiny.yaml", *other, *hard)
        write_coco()
        yield folder


def write_coco() -> None:
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
    for kind, entries in (("captions", captions), ("instances", objects)):
        content = {"images": images, "annotations": entries, "categories": [{"id": 18, "name": "dog"}]}
        for split in ("train", "val"):
            Path(f"coco/annotations/{kind}_{split}2017.json").write_text(json.dumps(content))
    overlay = {"data": {"source": {"class_path": "captioning.data.CocoSource", "init_args": {"root": "coco"}}}}
    Path("pets.yaml").write_text(yaml.safe_dump(overlay))


def metrics_of_test(*options: object) -> dict[str, Any]:
    """The metrics of a test on validation images, without its stage in their names."""
    shutil.rmtree("scored", ignore_errors=True)
    command("test", *options, *VAL, "--results", "scored")
    return {name.removeprefix("test/"): value for name, value in json.loads(read("scored/test_metrics.json")).items()}


def read(name: str) -> str:
    return Path(name).read_text()


def test_a_checkpoint_is_tested_on_another_data_set_with_its_own_vocabulary(workdir, capsys):
    command("test", "--ckpt_path", CHECKPOINT)
    own = read("runs/tiny/test_metrics.json")
    capsys.readouterr()
    command("test", "--ckpt_path", CHECKPOINT, "--config", "pets.yaml", *VAL)
    assert "val split, 2 images" in capsys.readouterr().out
    assert read("runs/tiny/test_metrics.json") == own
    captions = json.loads(read("runs/tiny/pets/val/test_captions.json"))
    assert [caption["references"] for caption in captions] == [texts for _, _, texts in PICTURES]
    assert sum(len(caption["reference_hits"]) for caption in captions) == 4  # of dog, dogs, puppy; not of the hot dog
    known = set(load(CHECKPOINT).vocabulary.words)
    assert all(set(caption["caption"].split()) <= known for caption in captions)


def test_the_search_is_the_models_and_an_options_never_a_configurations(workdir):
    other_search = {"model": {"search": {"beam_size": 3, "max_length": 2, "no_repeat_content": True}}}
    Path("searches.yaml").write_text(yaml.safe_dump(other_search | yaml.safe_load(read("pets.yaml"))))
    expected = {key: value for key, value in vars(load(CHECKPOINT).options).items() if key in vars(BeamOptions())}
    for config in (["--config", "searches.yaml"], ["--config", "runs/tiny/config.yaml"], []):
        for options, changes in (([], {}), (["--model.search.beam_size", 2], {"beam_size": 2})):
            search = metrics_of_test("--ckpt_path", CHECKPOINT, *config, *options)["conditions"]
            assert {key: search[key] for key in expected} == expected | changes


def test_another_split_fewer_images_and_other_data_do_not_replace_the_test_of_a_run(workdir, capsys):
    command("test", "--ckpt_path", CHECKPOINT)
    own = read("runs/tiny/test_metrics.json")
    command("test", "--ckpt_path", CHECKPOINT, "--split", "val")
    command("test", "--ckpt_path", CHECKPOINT, "--config", "runs/other/config.yaml")
    Path("moved").symlink_to("shapes")
    for words in (["--data.source.init_args.root", "moved"], ["--data.limit_images", "1"]):
        error = refusal(capsys, "test", "--ckpt_path", CHECKPOINT, *words)
        assert f"{words[0]}: tests other data than the run's; name a folder" in error
        command("test", "--ckpt_path", CHECKPOINT, *words, "--results", words[1])
    assert read("runs/tiny/test_metrics.json") == own
    folders = ("runs/tiny/val", "runs/tiny/other", "moved", "1")
    written = [json.loads(read(f"{name}/test_metrics.json")) for name in folders]
    sources = [metrics["provenance"]["settings"]["data"]["source"]["init_args"]["root"] for metrics in written]
    assert sources == [str(workdir / "shapes"), str(workdir / "shapes"), "moved", str(workdir / "shapes")]


def test_two_data_sets_with_one_overlay_have_folders_of_their_own(workdir):
    Path("few.yaml").write_text("data: {limit_images: 1}\n")
    for data in ("pets.yaml", "runs/other/config.yaml"):
        command("test", "--ckpt_path", CHECKPOINT, "--config", data, "--config", "few.yaml")
    folders = ("runs/tiny/pets_few", "runs/tiny/other_few")
    written = [json.loads(read(f"{name}/test_metrics.json"))["provenance"]["settings"]["data"] for name in folders]
    assert [data["source"]["class_path"].rpartition(".")[2] for data in written] == ["CocoSource", "ShapesSource"]
    assert [data["limit_images"] for data in written] == [1, 1]


def test_a_dotted_key_of_a_configuration_is_read_as_in_fit(workdir, capsys):
    Path("one.yaml").write_text("data.limit_images: 1\ndata:\n  source.init_args: {root: coco}\n")
    command("test", "--ckpt_path", CHECKPOINT, "--config", "pets.yaml", "--config", "one.yaml", *VAL)
    assert "val split, 1 images" in capsys.readouterr().out
    data = json.loads(read("runs/tiny/pets_one/val/test_metrics.json"))["provenance"]["settings"]["data"]
    assert data["limit_images"] == 1 and data["source"]["class_path"].endswith("CocoSource")
    Path("one.yaml").write_text("data.limit_image: 1\n")
    line = refusal(capsys, "test", "--ckpt_path", CHECKPOINT, "--config", "one.yaml")
    assert "one.yaml: an option of data must be one of" in line and "did you mean limit_images" in line


def test_results_that_are_a_file_are_refused_before_the_model_is_read(workdir, capsys):
    error = refusal(capsys, "predict", "--ckpt_path", "missing.ckpt", "--results", "tiny.yaml")
    assert error == "error: --results tiny.yaml: is a file; name a folder"


def test_metrics_are_printed_although_their_files_cannot_be_written(workdir, capsys):
    with pytest.raises(SystemExit):
        command("test", "--ckpt_path", CHECKPOINT, "--results", "tiny.yaml/scored")
    said = capsys.readouterr()
    assert "\nBLEU-1 " in said.out
    assert said.err.splitlines()[-1].startswith("error: tiny.yaml/scored/test_metrics.json: ")


def test_several_models_are_tested_as_an_ensemble(workdir, capsys):
    """The second model's encoder has another preprocessing, so its views are loaded apart from the batches."""
    both = metrics_of_test("--ckpt_path", CHECKPOINT, "--ensemble", OTHER)
    assert "1 images; 2 models, attention of the first; beam 1" in capsys.readouterr().out
    (caption,) = json.loads(read("scored/test_captions.json"))
    (image,) = sorted(Path("shapes").rglob("val*/*.png"))[:1]
    expected = load([CHECKPOINT, OTHER]).caption(image, beam_size=1)
    assert caption["caption"] == expected.text
    assert json.loads(read("scored/test_metrics.json"))["conditions"]["members"] == {OTHER: checksum(OTHER)}
    alone = [metrics_of_test("--ckpt_path", checkpoint)["nll"] for checkpoint in (CHECKPOINT, OTHER)]
    assert both["nll"] < sum(alone) / 2  # Jensen: the mean of probabilities beats the mean of logarithms


@pytest.mark.slow
def test_a_context_mode_reaches_the_models_of_an_ensemble_that_have_it(workdir, capsys):
    argmax = ["--context_mode", "argmax"]
    command("test", "--ckpt_path", CHECKPOINT, "--ensemble", OTHER, *argmax, *VAL)
    (caption,) = json.loads(read("runs/tiny/argmax/ensemble_other/val/test_captions.json"))
    (image,) = sorted(Path("shapes").rglob("val*/*.png"))[:1]
    mode: dict[str, Any] = {"beam_size": 1, "context_mode": "argmax"}
    assert caption["log_prob"] == pytest.approx(load([CHECKPOINT, OTHER]).caption(image, **mode).log_prob)
    assert caption["log_prob"] != pytest.approx(load([CHECKPOINT, OTHER]).caption(image, beam_size=1).log_prob)
    assert "SoftAttention.context_mode" in refusal(capsys, "test", "--ckpt_path", CHECKPOINT, *argmax)


def test_models_that_cannot_form_an_ensemble_are_refused(workdir, capsys):
    options = ["--ckpt_path", CHECKPOINT, "--ensemble", "nowhere.ckpt"]
    assert "nowhere.ckpt: the checkpoint cannot be read" in refusal(capsys, "test", *options)
