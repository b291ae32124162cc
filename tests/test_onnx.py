"""Graphs without PyTorch: the same captions word for word, from one image to several, whatever attention and output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import SCRIPTS, load_script, save_image
from helpers_faults import command
from helpers_runs import save_checkpoint
from PIL import Image

from captioning.attention import (
    CoverageScore,
    Entmax15,
    GeneralScore,
    HardAttention,
    MultiHeadAttention,
    SoftAttention,
    Sparsemax,
)
from captioning.inference import load
from captioning.model import SummedOutput

for _library in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(_library, reason="needs the onnx extra")

SEARCH = {"beam_size": 3, "max_length": 7, "length_normalization": 0.5, "min_length": 1, "no_repeat_ngram": 2}
SLOW = {
    "1.5-entmax": {"attention": lambda score: SoftAttention(score, normaliser=Entmax15())},
    "heads": {"gated": False, "attention": lambda score: MultiHeadAttention(score, heads=2)},
    "hard argmax": {"attention": lambda score: HardAttention(score, inference="argmax")},
    "coverage": {"attention": lambda _: SoftAttention(CoverageScore(5))},
    "general": {"attention": lambda _: SoftAttention(GeneralScore())},
}
MODELS = {
    "soft": {},
    "summed": {"output": SummedOutput()},
    "summed over a sparse support": {
        "output": SummedOutput(),
        "attention": lambda score: SoftAttention(score, normaliser=Sparsemax()),
    },
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> list[Path]:
    """Images of several sizes and kinds, one to be turned, one transparent, one large enough to be decoded smaller."""
    folder = tmp_path_factory.mktemp("photos")
    paths = [save_image(folder / f"{n}.png", n, (20 + 7 * n, 30)) for n in range(4)]
    large = Image.open(save_image(folder / "large.png", 9, (900, 700))).resize((450, 350))
    exif = Image.Exif()
    exif[0x0112] = 6
    large.save(folder / "turned.jpg", exif=exif)
    clear = Image.open(paths[0]).convert("RGBA")
    clear.putalpha(90)
    clear.save(folder / "clear.png")
    return [*paths, folder / "turned.jpg", folder / "clear.png"]


def exported(tmp_path: Path, **changes) -> tuple[Path, Path]:
    checkpoint = save_checkpoint(tmp_path / "best.ckpt", search=SEARCH, **changes)
    command("export", "--model", checkpoint, "--output", tmp_path / "out", "--onnx")
    return checkpoint, tmp_path / "out"


@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_graphs_say_what_the_checkpoint_says_word_for_word(tmp_path, photos, name):
    checkpoint, folder = exported(tmp_path, **(MODELS | SLOW)[name])
    captioner, graphs = load(checkpoint), load_script("caption_onnx").OnnxCaptioner(folder)
    log_probs = set()
    for photo in photos:
        expected, captions = captioner(photo), graphs.caption(photo)
        assert graphs.text(captions[0]) == expected.text
        assert captions[0].log_prob == pytest.approx(expected.log_prob, abs=1e-4)
        np.testing.assert_allclose(captions[0].alphas, expected.trace.alphas, atol=1e-4)
        assert [graphs.text(other) for other in captions[1:]] == [other.text for other in expected.alternatives]
        assert graphs.text(graphs.caption(photo, beam_size=1)[0]) == captioner(photo, method="greedy").text
        log_probs.add(round(expected.log_prob, 3))
    assert len(log_probs) > 1  # the image is seen


def test_no_torch_and_nothing_of_this_package_is_needed_and_a_bad_image_costs_itself(tmp_path, photos):
    checkpoint, folder = exported(tmp_path)
    (tmp_path / "bad.png").write_text("no image")
    words = ["caption_onnx.py", str(folder), str(photos[0]), "bad.png", str(photos[4]), "--beam_size", "2"]
    program = f"""
import runpy, sys
sys.argv = {words!r}
try:
    runpy.run_path({str(SCRIPTS / "caption_onnx.py")!r}, run_name="__main__")
finally:
    assert not {{"torch", "captioning", "torchvision"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    first, second = load(checkpoint)([photos[0], photos[4]], beam_size=2)
    assert done.stdout == f"{photos[0]}\t{first.text}\n{photos[4]}\t{second.text}\n"
    assert done.returncode == 2 and done.stderr.startswith("error: bad.png: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("content", [None, b"{"])
def test_a_folder_without_graphs_or_damaged_is_one_line(tmp_path, capsys, monkeypatch, photos, content):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    monkeypatch.setattr("sys.argv", ["caption_onnx.py", str(tmp_path), str(photos[0])])
    with pytest.raises(SystemExit) as stopped:
        load_script("caption_onnx").main()
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1 and str(tmp_path) in error


def test_what_cannot_be_a_graph_is_refused_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        exported(tmp_path, attention=lambda score: HardAttention(score, inference="sample"))
    error = capsys.readouterr().err
    assert exit.value.code == 2 and "draws its locations is not exported" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
