"""Images, annotations, features and results that cannot be used: bounded, one line, and the rest is kept."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import random_view, save_image
from helpers_faults import Fault, ends, faults, proves
from helpers_runs import CAPTION, make_run, save_checkpoint
from PIL import Image
from pycocotools import mask as run_lengths

from captioning.cli import caption, compare
from captioning.comparison.runs import find_runs
from captioning.data import CocoSource, FolderSource, KarpathySource
from captioning.data.features import FeatureCache, FeatureWriter, verify
from captioning.data.images import MAX_PIXELS, load_image, upright
from captioning.data.objects import check_outline
from captioning.data.records import MAX_WORDS
from captioning.data.transforms import Preprocessing
from captioning.errors import InputError
from captioning.inference import load
from captioning.vocabulary import Vocabulary


def says(fault: Fault, run: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(InputError) as caught:
        run(*args)
    assert fault.sees in str(caught.value)
    return str(caught.value)


# Images


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("run") / "best.ckpt", search={"max_length": 6}))


def bad_image(folder: Path, kind: str) -> Path:
    path = folder / f"bad.{'jpg' if kind == 'narrow' else 'png'}"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "bomb":
        Image.new("1", (MAX_PIXELS // 10_000 + 1, 10_000)).save(path)
    elif kind == "narrow":
        Image.new("RGB", (1, 65_500)).save(path)
    elif kind == "text":
        path.write_text("no image")
    else:
        path.write_bytes(save_image(path).read_bytes()[:300])
    return path


IMAGES = {
    Fault("an image that is a pipe", "is no regular file", kept="the other images"): "pipe",
    Fault("an image that is a device", "is no regular file", kept="the other images"): "device",
    Fault(
        "an image of 10,001 x 10,000 pixels", "10001 x 10000 pixels are more than 100,000,000", kept="the other images"
    ): "bomb",
    Fault("an image cut short", "cannot be read as an image", kept="the other images"): "cut",
    Fault("a text in place of an image", "cannot be read as an image", kept="the other images"): "text",
}


@faults(IMAGES)
def test_an_image_that_cannot_be_read_costs_itself_alone(tmp_path, capsys, checkpoint, fault, case):
    """Its line names it; JSON and explorer have the others; exit code 2."""
    bad, good = bad_image(tmp_path, case), save_image(tmp_path / "good.png", 1)
    says(fault, load_image, bad)
    outputs = [tmp_path / "out.json", tmp_path / "out.html"]
    arguments = [
        str(bad),
        str(good),
        "--model",
        checkpoint,
        "--json",
        str(outputs[0]),
        "--explorer",
        str(outputs[1]),
    ]
    with pytest.raises(SystemExit) as ended:
        caption.main(arguments)
    err = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and fault.sees in err[0] and err[1] == "error: 1 of 2 images unreadable"
    assert json.loads(outputs[0].read_text())["image"] == str(good)
    assert "good.png" in outputs[1].read_text()


@proves(
    Fault("an overlay that cannot be written", "b.png: cannot be written (", kept="the other overlays, JSON, explorer")
)
def test_an_overlay_that_cannot_be_written_costs_itself_alone(tmp_path, capsys, checkpoint, fault):
    for name in "abc":
        save_image(tmp_path / f"{name}.png", ord(name))
    (tmp_path / "out" / "b.png").mkdir(parents=True)
    arguments = [*(str(tmp_path / f"{name}.png") for name in "abc"), "--model", checkpoint]
    with pytest.raises(SystemExit) as ended:
        caption.main([*arguments, "--overlay", str(tmp_path / "out"), "--json", str(tmp_path / "o.json")])
    err = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and fault.sees in err[0] and err[1] == "error: 1 of 3 overlays not written"
    written = [json.loads(line) for line in (tmp_path / "o.json").read_text().splitlines()]
    assert [Path(entry.get("overlay", "none")).name for entry in written] == ["a.png", "none", "c.png"]
    assert (tmp_path / "out" / "c.png").is_file()


@proves(
    Fault("an image of 1 x 65,500 pixels that is to be cut", "1 x 65500 pixels are too narrow for a short side of 256")
)
def test_a_line_of_pixels_is_not_blown_up(tmp_path, fault):
    preprocessing = Preprocessing(256, 224, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    path = bad_image(tmp_path, "narrow")
    assert str(path) in says(fault, preprocessing.load, path)
    squashed = Preprocessing(32, None, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert squashed(squashed.load(path)).shape == (3, 32, 32)


def test_a_large_jpeg_is_decoded_small(tmp_path):
    """14,000 x 8,000 pixels are beyond the limit as they are, and a 64th of it as they are decoded."""
    Image.new("L", (14_000, 8_000), 77).save(tmp_path / "x.jpg")
    assert load_image(tmp_path / "x.jpg", minimum_side=256).size == (1750, 1000)
    with pytest.raises(InputError, match="are more than"):
        load_image(tmp_path / "x.jpg")


MODES = {"RGB": "png", "RGBA": "png", "LA": "png", "L": "jpg", "P": "png", "I;16": "png"}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", MODES)
def test_an_orientation_is_applied_to_images_of_every_mode(tmp_path, mode, orientation):
    """Against Pillow's own turning of the same picture in 8-bit RGB."""
    from PIL import ImageOps

    grey = np.arange(35, dtype=np.uint16).reshape(5, 7) * 7
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(grey * 257) if mode == "I;16" else Image.fromarray(grey.astype(np.uint8)).convert(mode)
    image.save(tmp_path / f"x.{MODES[mode]}", exif=exif, **({"quality": 100} if MODES[mode] == "jpg" else {}))
    plain = Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    plain.getexif()[0x0112] = orientation
    expected = ImageOps.exif_transpose(plain)
    loaded = load_image(tmp_path / f"x.{MODES[mode]}")
    assert loaded.size == (7, 5)  # as stored: COCO's masks are
    turned = upright(loaded)
    assert turned.size == expected.size
    np.testing.assert_allclose(np.asarray(turned, dtype=int), np.asarray(expected, dtype=int), atol=2)


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0", b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01", b"nonsense"]
)
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
@proves(Fault("a damaged EXIF header", "", 0, "the image, as it is stored"))
def test_a_damaged_exif_header_costs_the_orientation_alone(tmp_path, checkpoint, exif, suffix, fault):
    path = tmp_path / f"x.{suffix}"
    random_view(20, 10).save(path, exif=exif)
    assert upright(load_image(path)).size == (20, 10)
    assert load(checkpoint)(path).view.size == (12, 12)


# Annotations


def polygon(value: float) -> list[list[float]]:
    return [[1.0, 1.0, 5.0, 1.0, value, 5.0]]


OUTLINES: dict[Fault, Any] = {
    Fault("a polygon coordinate of 1e9", "its polygon leaves its image"): polygon(1e9),
    Fault("a polygon coordinate NaN", "(JSON is malformed: "): polygon(float("nan")),
    Fault("a polygon coordinate infinite", "(JSON is malformed: "): polygon(float("inf")),
    Fault("a polygon of two points", "its polygon is no list of x, y of three"): [[1.0, 2.0, 3.0, 4.0]],
    Fault("a polygon that holds a text", "its polygon leaves its image"): [[1.0, 1.0, 5.0, 1.0, "x", 5.0]],
    Fault("run lengths of another size", "its run lengths are of size"): {"size": [10**6, 10**6], "counts": [10**12]},
    Fault("run lengths that are too long", "do not add up"): {"size": [8, 9], "counts": [10**12]},
    Fault("run lengths below 0", "do not add up"): {"size": [8, 9], "counts": [100, -28]},
    Fault("compressed run lengths that are too long", "do not add up"): {"size": [8, 9], "counts": "oooooX1"},
    Fault("compressed run lengths cut short", "do not add up"): {"size": [8, 9], "counts": "1"},
    Fault("compressed run lengths of other letters", "are not in COCO's text"): {"size": [8, 9], "counts": "\x01"},
    Fault("an outline that is a number", "neither polygons nor run lengths"): 7,
}


def coco(root: Path, caption: str = "a dog", image_id: Any = 1, outline: Any = None, **image: Any) -> CocoSource:
    (root / "annotations").mkdir(exist_ok=True)
    images = [{"id": image_id, "file_name": "1.jpg", "height": 8, "width": 9} | image]
    captions = {"images": images, "annotations": [{"id": 1, "image_id": image_id, "caption": caption}]}
    thing = {"id": 3, "image_id": image_id, "category_id": 1, "segmentation": outline}
    instances = {"images": images, "annotations": [thing], "categories": [{"id": 1, "name": "dog"}]}
    for name, content in (("captions", captions), ("instances", instances)):
        (root / f"annotations/{name}_val2017.json").write_text(json.dumps(content))
    return CocoSource(str(root))


@faults(OUTLINES)
def test_an_outline_that_cannot_be_drawn_is_refused_before_any_is_drawn(tmp_path, fault, case):
    line = says(fault, coco(tmp_path, outline=case).objects, "val")
    assert "object 3" in line or "JSON is malformed" in line


@proves(Fault("an image said to have 10^9 x 10^9 pixels", "not a size of at most 100,000,000 pixels"))
def test_an_impossible_size_of_an_image_is_refused(tmp_path, fault):
    source = coco(tmp_path, outline=polygon(2.0), height=10**9, width=10**9)
    says(fault, source.objects, "val")


def test_honest_outlines_pass_and_are_drawn(tmp_path):
    mask = np.random.default_rng(0).random((8, 9)) < 0.5
    packed = run_lengths.encode(np.asfortranarray(mask.astype(np.uint8)))
    outline = {"size": [8, 9], "counts": packed["counts"].decode()}
    (dog,) = coco(tmp_path, outline=outline).objects("val")(1)
    assert np.array_equal(dog.mask, mask)
    assert coco(tmp_path, outline=polygon(5.5)).objects("val")(1)[0].mask.any()


@pytest.mark.parametrize("seed", range(30))
def test_compressed_run_lengths_are_counted_as_pycocotools_packs_them(seed):
    draw = np.random.default_rng(seed)
    mask = draw.random((int(draw.integers(1, 90)), int(draw.integers(1, 90)))) < draw.random()
    counts = run_lengths.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"].decode()
    check_outline({"size": list(mask.shape), "counts": counts}, *mask.shape)
    with pytest.raises(InputError):
        check_outline({"size": [mask.shape[0] + 1, mask.shape[1]], "counts": counts}, mask.shape[0] + 1, mask.shape[1])


CAPTIONS = {
    Fault("a caption of 10,000 words", f"has a caption of 10,000 words, more than {MAX_WORDS}"): {
        "caption": "a " * 10_000
    },
    Fault("half of a pair of surrogates in a caption", "(JSON is malformed: "): {"caption": "a \ud800 dog"},
    Fault("an image number of 2^63", "image ids must be in 0 .. 2^63 - 1"): {"image_id": 2**63},
    Fault("an image number below 0", "image ids must be in 0 .. 2^63 - 1"): {"image_id": -1},
}


@faults(CAPTIONS)
def test_captions_that_cannot_be_used_are_refused(tmp_path, fault, case):
    says(fault, coco(tmp_path, **case).index, "val")


DEEP = "[" * 100_000
HALF_A_PAIR = '{"image": "\\ud800.jpg", "caption": "a dog", "split": "val"}'


def written(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


READERS: dict[Fault, Callable[[Path], Any]] = {
    Fault("COCO's JSON nested 100,000 deep", "not a COCO annotation file"): lambda folder: CocoSource(
        str(Path(written(folder / "annotations/captions_val2017.json", DEEP)).parent.parent)
    ).index("val"),
    Fault("Karpathy's JSON nested 100,000 deep", "not a split file"): lambda folder: KarpathySource(
        written(folder / "dataset.json", DEEP), str(folder)
    ).index("val"),
    Fault("a line of JSON nested 100,000 deep", "line 1 is not JSON"): lambda folder: FolderSource(
        str(Path(written(folder / "captions.jsonl", DEEP)).parent)
    ).index("val"),
    Fault("half of a pair of surrogates in an image's name", "is no text that UTF-8 can hold"): lambda folder: (
        FolderSource(str(Path(written(folder / "captions.jsonl", HALF_A_PAIR)).parent)).index("val")
    ),
    Fault("a vocabulary nested 100,000 deep", "cannot be read as JSON"): lambda folder: Vocabulary.load(
        written(folder / "words.json", DEEP)
    ),
}


@faults(READERS)
def test_nesting_is_refused(tmp_path, fault, case):
    says(fault, case, tmp_path)


# Features

FINGERPRINT = {"encoder": "x", "grid_size": [2, 3]}
HEADERS = {
    Fault("features whose header lacks the shape", "its shape or count of images is damaged"): {"shape": None},
    Fault("features of a negative number of images", "its shape or count of images is damaged"): {"shape": [-3, 6, 4]},
    Fault("features whose count is a text", "its shape or count of images is damaged"): {"shard_images": "3"},
    Fault("features of no encoder", "names no encoder"): {"fingerprint": 7},
    Fault("features of format 2", "not a feature cache of format 3"): {"format": 2},
    Fault("features whose header says another shape", "missing or incomplete"): {"shape": [3, 6, 5]},
}


@faults(HEADERS)
def test_features_with_an_edited_header_are_refused(tmp_path, fault, case):
    out = FeatureWriter(tmp_path, "val", paths=["a", "b", "c"], fingerprint=FINGERPRINT, shape=(6, 4))
    out.write(torch.ones(3, 6, 4))
    header = json.loads((tmp_path / "val.json").read_text())
    (tmp_path / "val.json").write_text(json.dumps(header | case))
    says(fault, lambda: FeatureCache(tmp_path, "val", FINGERPRINT).check(torch.tensor([0])))


@proves(Fault("features said to be of 10^12 images", "has 1,000,000,000,000 images where val.images.json names 3"))
def test_features_are_as_many_as_their_images(tmp_path, fault):
    """Verifying them would otherwise never end."""
    out = FeatureWriter(tmp_path, "val", paths=["a", "b", "c"], fingerprint=FINGERPRINT, shape=(6, 4), shard_images=1)
    out.write(torch.ones(3, 6, 4))
    header = json.loads((tmp_path / "val.json").read_text())
    (tmp_path / "val.json").write_text(json.dumps(header | {"shape": [10**12, 6, 4]}))
    for use in (lambda: verify(tmp_path), lambda: FeatureCache(tmp_path, "val", FINGERPRINT).find(["a"])):
        says(fault, use)


# Results of runs

RESULTS = {
    Fault("a metrics.csv that is no text", "metrics.csv: cannot be read"): (
        "metrics/version_0/metrics.csv",
        b"step,a\n\xff\xfe\n",
    ),
    Fault("a metrics.csv with a field of 1 MB", "metrics.csv: cannot be read (field larger"): (
        "metrics/version_0/metrics.csv",
        b"step,a\n1," + b"7" * 1_000_000 + b"\n",
    ),
    Fault("a wandb_run.json that is cut", "wandb_run.json: cannot be read"): ("wandb_run.json", b'{"id": "a'),
    Fault("a wandb_run.json of another kind", "wandb_run.json: does not name a wandb run"): ("wandb_run.json", b"[3]"),
    Fault("a test_captions.json nested 100,000 deep", "test_captions.json: cannot be read"): (
        "test_captions.json",
        DEEP.encode(),
    ),
    Fault("a test_metrics.json that is a list", "test_metrics.json: not what `captioning test` writes"): (
        "test_metrics.json",
        b"[]",
    ),
    Fault("a test_metrics.json whose search is a list", "test_metrics.json: search is not a mapping"): (
        "test_metrics.json",
        b'{"test/bleu4": 1, "search": [3]}',
    ),
    Fault("a caption of a test that is a list", "Expected `str`, got `array` - at `$[0].caption`"): (
        "test_captions.json",
        b'[{"image_id": 7, "caption": ["a"], "references": ["b"]}]',
    ),
    Fault("a reference of a test that is a number", "Expected `str`, got `int` - at `$[0].references[0]`"): (
        "test_captions.json",
        b'[{"image_id": 7, "caption": "a", "references": [3]}]',
    ),
    Fault("a caption of a test without references", "image 7 has no references"): (
        "test_captions.json",
        b'[{"image_id": 7, "caption": "a", "references": []}]',
    ),
    Fault("a log-probability of a test that is a text", "Expected `float | null`, got `str`"): (
        "test_captions.json",
        b'[{"image_id": 7, "caption": "a", "references": ["b"], "log_prob": "x"}]',
    ),
    Fault("a noun of a test whose chance is a text", "Expected `float`, got `str` - at `$[0].hits[0].chance`"): (
        "test_captions.json",
        json.dumps([CAPTION | {"hits": [{"step": 0, "noun": "a", "hit": True, "chance": "x"}]}]).encode(),
    ),
    Fault("a noun of a test whose correctness is a list", "Expected `float`, got `array`"): (
        "test_captions.json",
        json.dumps(
            [CAPTION | {"hits": [{"step": 0, "noun": "a", "hit": True, "chance": 0.1, "correctness": []}]}]
        ).encode(),
    ),
    Fault("a config.yaml of a run in Latin-1", "config.yaml: not a YAML file"): ("config.yaml", b"name: Stra\xdfe"),
}


@faults(RESULTS)
def test_damaged_results_of_a_run_are_named(tmp_path, capsys, fault, case):
    name, content = case
    folder = make_run(tmp_path / "a", captions=[CAPTION], settings={}, csv="step,a\n1,2\n")
    other = make_run(tmp_path / "b", captions=[CAPTION], settings={})
    (folder / name).write_bytes(content)
    says(fault, find_runs, str(folder))
    ends(capsys, fault, compare.main, [str(other), str(folder)])
