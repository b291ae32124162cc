"""Images as the model sees them, against torchvision and hand-made cases, and files that are no image."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from captioning.data.images import load_image, rgb
from captioning.data.transforms import Augmentation, Preprocessing
from captioning.errors import InputError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colors: every pixel differs from the others, and interpolation changes pixels."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("size", [(61, 43), (43, 61), (30, 30), (33, 32), (200, 33)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_evaluation_equals_torchvisions_own_transform(size, interpolation):
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms._presets import ImageClassification

    theirs = ImageClassification(
        crop_size=28, resize_size=32, mean=MEAN, std=STD, interpolation=InterpolationMode(interpolation)
    )
    ours = Preprocessing(32, 28, MEAN, STD, interpolation)
    assert torch.allclose(ours(picture(*size)), theirs(picture(*size)), atol=1e-5)


@pytest.mark.parametrize("size", [(400, 300), (300, 400), (300, 300), (641, 97)])
def test_view_box_is_the_part_of_the_image_in_view(size):
    preprocessing = Preprocessing(40, 32, MEAN, STD)
    image = picture(*size)
    left, top, right, bottom = preprocessing.view_box(image.size)
    box = (left * image.width, top * image.height, right * image.width, bottom * image.height)
    cut = image.resize((32, 32), Image.Resampling.BILINEAR, box=box)
    view = np.asarray(preprocessing.view_image(image), dtype=float)
    np.testing.assert_allclose(np.asarray(cut, dtype=float), view, atol=2)


def test_without_a_crop_the_whole_image_is_squashed():
    preprocessing = Preprocessing(16, None, MEAN, STD, "nearest")
    image = Image.fromarray(np.kron(np.arange(4, dtype=np.uint8).reshape(2, 2), np.ones((10, 30), dtype=np.uint8)))
    view = np.asarray(preprocessing.view_image(image))[:, :, 0]
    assert view.shape == (16, 16)
    assert [view[0, 0], view[0, -1], view[-1, 0], view[-1, -1]] == [0, 1, 2, 3]
    assert preprocessing.view_box((61, 43)) == (0, 0, 1, 1)


@pytest.mark.parametrize("preprocessing", [Preprocessing(24, 16, MEAN, STD), Preprocessing(24, None, MEAN, STD)])
@pytest.mark.parametrize("size", [(60, 36), (36, 60)])
def test_a_mask_follows_its_object_into_the_view(preprocessing, size):
    width, height = size
    mask = np.zeros((height, width), dtype=bool)
    mask[height // 3 : 2 * height // 3, width // 2 : 3 * width // 4] = True
    white_where_masked = Image.fromarray(mask.astype(np.uint8) * 255).convert("RGB")
    view = np.asarray(preprocessing.view_image(white_where_masked))[:, :, 0]
    moved = preprocessing.evaluation_view((width, height)).mask(mask)
    assert moved.dtype == bool and moved.shape == preprocessing.size and moved.any()
    assert view[moved].min() > 100 and view[~moved].max() < 156


def drawn(preprocessing: Preprocessing, image: Image.Image, **changes: float) -> torch.Tensor:
    """The training input (3, height, width) of a view that is drawn."""
    return preprocessing(image, Augmentation(**changes).random_view(preprocessing, image.size, torch.default_generator))


def test_random_crops_are_windows_of_the_resized_image():
    preprocessing = Preprocessing(20, 14, (0, 0, 0), (1, 1, 1))
    image = picture(30, 20)
    resized = Preprocessing(20, None, (0, 0, 0), (1, 1, 1)).to_input_batch([image])[0]  # (3, 20, 30)
    windows = resized.unfold(1, 14, 1).unfold(2, 14, 1)  # (3, 7, 17, 14, 14)
    places = set()
    for _ in range(20):
        matches = (windows == drawn(preprocessing, image, random_crop=True)[:, None, None]).all(dim=(0, 3, 4)).nonzero()
        assert len(matches) == 1
        places.add(tuple(matches[0].tolist()))
    assert len({row for row, _ in places}) > 2 and len({col for _, col in places}) > 4


def test_training_does_not_mirror_by_default():
    whole, cut = Preprocessing(12, None, MEAN, STD), Preprocessing(12, 8, MEAN, STD)
    image = picture(12, 12)
    assert all(torch.equal(drawn(whole, image, random_crop=True), whole(image)) for _ in range(8))
    assert torch.equal(drawn(whole, image, flip=1.0), whole(image).flip(2))
    assert torch.equal(drawn(cut, image), cut(image))


def test_a_preprocessing_survives_json():
    preprocessing = Preprocessing(20, 14, MEAN, STD, "bicubic")
    assert Preprocessing(**json.loads(json.dumps(dataclasses.asdict(preprocessing)))) == preprocessing


# Files


def test_transparency_becomes_white_and_16_bit_gray_is_scaled(tmp_path):
    Image.fromarray(np.array([[0, 32896, 65535]], dtype=np.uint16)).save(tmp_path / "deep.png")
    assert np.asarray(load_image(tmp_path / "deep.png"))[0, :, 0].tolist() == [0, 128, 255]
    Image.fromarray(np.array([[[9, 9, 9, 0], [9, 9, 9, 255]]], dtype=np.uint8)).save(tmp_path / "alpha.png")
    assert np.asarray(load_image(tmp_path / "alpha.png"))[0, :, 0].tolist() == [255, 9]
    palette = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), mode=None).convert("P")
    palette.putpalette([9, 9, 9, 40, 40, 40])
    palette.save(tmp_path / "palette.png", transparency=0)
    assert np.asarray(load_image(tmp_path / "palette.png"))[0, :, 0].tolist() == [255, 40]


MODES = {"RGB": "webp", "RGBA": "png", "LA": "png", "L": "jpg", "P": "png", "I;16": "png"}


@pytest.mark.parametrize("orientation", [1, 3, 5, 6])
@pytest.mark.parametrize("mode", MODES)
def test_a_photo_of_any_mode_is_turned_upright_once(tmp_path, mode, orientation):
    """Against Pillow's own turning of the same picture in 8-bit RGB."""
    gray = np.arange(35, dtype=np.uint16).reshape(5, 7) * 7
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(gray * 257) if mode == "I;16" else Image.fromarray(gray.astype(np.uint8)).convert(mode)
    path = tmp_path / f"x.{MODES[mode]}"
    image.save(path, exif=exif, **{"jpg": {"quality": 100}, "webp": {"lossless": True}}.get(MODES[mode], {}))
    plain = Image.fromarray(gray.astype(np.uint8)).convert("RGB")
    plain.getexif()[0x0112] = orientation
    expected = ImageOps.exif_transpose(plain)
    turned = load_image(path)
    assert turned.size == rgb(turned).size == expected.size
    np.testing.assert_allclose(np.asarray(turned, dtype=int), np.asarray(expected, dtype=int), atol=2)


def test_integers_of_32_bits_are_read_as_8_bits_if_they_fit():
    gray = np.arange(35, dtype=np.int32).reshape(5, 7) * 7
    for factor in (1, 257):
        assert np.array_equal(np.asarray(rgb(Image.fromarray(gray * factor)))[:, :, 0], gray)


@pytest.mark.parametrize("exif", [b"Exif\0\0MM\0*\xff\xff\xff\xff", b"nonsense"])
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_a_photo_with_a_damaged_exif_header_is_read_without_its_orientation(tmp_path, exif, suffix):
    picture(20, 10).save(tmp_path / f"x.{suffix}", exif=exif)
    assert load_image(tmp_path / f"x.{suffix}").size == (20, 10)


def test_large_jpegs_are_decoded_at_a_reduced_size_that_still_suffices(tmp_path):
    picture(640, 480).save(tmp_path / "large.jpg", quality=95)
    widths = [load_image(tmp_path / "large.jpg", minimum_side=side).width for side in (100, 240, 241, 1000)]
    assert widths == [160, 320, 640, 640]
    preprocessing = Preprocessing(64, 56, MEAN, STD)
    full, reduced = (load_image(tmp_path / "large.jpg", minimum_side=side) for side in (None, preprocessing.resize))
    full, reduced = (np.asarray(preprocessing.view_image(image), dtype=float) for image in (full, reduced))
    assert np.abs(full - reduced).mean() < 2


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "bmp", "tif", "webp"])
def test_damaged_files_are_named(tmp_path, suffix):
    path = tmp_path / f"cut.{suffix}"
    picture(90, 70).save(path)
    whole = path.read_bytes()
    for fraction in (0, 0.5, 0.9):
        path.write_bytes(whole[: int(len(whole) * fraction)])
        with pytest.raises(InputError, match=rf"cut\.{suffix}: cannot be read as an image \([^\n]*\); replace"):
            load_image(path)


def test_a_missing_file_and_an_image_of_more_pixels_than_pillow_opens_are_one_line(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"gone\.jpg: no such image file"):
        load_image(tmp_path / "gone.jpg")
    picture(64, 64).save(tmp_path / "vast.jpg")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(InputError, match=r"vast.jpg: cannot be read as an image \(Image size"):
        load_image(tmp_path / "vast.jpg")
