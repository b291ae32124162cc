"""An image has the same caption as a path, array, tensor or Pillow image; other arguments are refused by name."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import save_image
from helpers_runs import save_checkpoint
from PIL import Image

from captioning.errors import InputError
from captioning.inference import load
from captioning.inference.sources import open_image


@pytest.fixture(scope="module")
def captioner(tmp_path_factory):
    return load(save_checkpoint(tmp_path_factory.mktemp("run") / "best.ckpt"))


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return save_image(tmp_path_factory.mktemp("images") / "cat.png", 3, (30, 20))


def pixels(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def test_every_form_has_the_same_pixels(path):
    array = np.array(pixels(path))
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    opaque = np.dstack([array, np.full(array.shape[:2], 255, np.uint8)])
    files = [path, str(path), pixels(path), path.read_bytes()]
    for source in (*files, array, array / 255, tensor, tensor / 255, opaque):
        np.testing.assert_array_equal(np.array(open_image(source, 20)), array, str(type(source)))
    gray = np.arange(12, dtype=np.uint8).reshape(3, 4)
    for source in (gray, gray[..., None], torch.from_numpy(gray), torch.from_numpy(gray)[None]):
        np.testing.assert_array_equal(np.array(open_image(source, 20)), np.repeat(gray[..., None], 3, axis=2))


def test_a_batch_is_captioned_image_by_image(captioner, path, tmp_path):
    other = save_image(tmp_path / "dog.png", 4, (30, 20))
    expected = [caption.text for caption in captioner([path, other], max_length=6)]
    arrays = np.stack([np.array(pixels(name)) for name in (path, other)])
    for batch in (arrays, torch.from_numpy(arrays).permute(0, 3, 1, 2), [arrays[0], other], (path, arrays[1])):
        assert [caption.text for caption in captioner(batch, max_length=6)] == expected


OPEN_FILES: dict[str, Callable[[Path], Any]] = {
    "file": lambda path: path.open("rb"),
    "buffer": lambda path: io.BytesIO(path.read_bytes()),
}


@pytest.mark.parametrize("kind", OPEN_FILES)
def test_an_open_file_is_one_image_that_is_drawn_after_it_was_closed(captioner, path, tmp_path, kind):
    source = OPEN_FILES[kind](path)
    (expected,) = captioner([path], max_length=6)
    caption = captioner(source, max_length=6)
    assert caption.text == expected.text and caption.path is None
    source.close()
    for drawn, name in ((caption, "open.png"), (expected, "path.png")):
        drawn.save_figure(tmp_path / name)
    assert (tmp_path / "open.png").read_bytes() == (tmp_path / "path.png").read_bytes()


def test_paths_in_an_array_are_several_images(captioner, path):
    for names in (np.array([str(path)] * 2), np.array([path, path], dtype=object)):
        assert len(captioner(names, max_length=6)) == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, r"images: an image is a path, .*, got NoneType"),
        ({"image": "cat.png"}, "got dict"),
        ([3.5], r"image: must be a path, .*, got float"),
        (np.zeros((4, 5, 2), np.uint8), r"array must be \(height, width, 1, 3 or 4\) or .*, got \(4, 5, 2\)"),
        (torch.zeros(5, 4, 3), r"tensor must be \(1, 3 or 4, height, width\) or .*, got \(5, 4, 3\)"),
        (np.full((4, 5, 3), 7.0), r"array of float64 must lie in 0 \.\. 1, got 7 \.\. 7"),
        (torch.zeros(3, 4, 5, dtype=torch.int64), "tensor must be uint8, or floating-point in 0 .. 1, got int64"),
        (b"no image", "bytes that cannot be read"),
        ("https://example.org/a.png", r"https://example\.org/a\.png: is an address; download the image"),
    ],
)
def test_an_argument_that_is_no_image_is_named(captioner, source, message):
    with pytest.raises(InputError, match=message):
        captioner(source)
