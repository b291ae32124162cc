"""Regions of phrases: Flickr30k Entities and COCO's masks, and where they lie in every view of an image."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from captioning.cells import CellGrid
from captioning.data import KarpathySource
from captioning.data.loading import CaptionDataset
from captioning.data.regions import RegionsInView
from captioning.data.transforms import Augmentation, Preprocessing
from captioning.errors import InputError
from captioning.vocabulary import Vocabulary

SENTENCES = """[/EN#1/animals A red dog] , on [/EN#2/scene the grass] .
Nothing is marked here .
"""
XML = """<annotation><size><width>80</width><height>40</height></size>
<object><name>1</name><bndbox><xmin>{0}</xmin><ymin>{1}</ymin><xmax>{2}</xmax><ymax>{3}</ymax></bndbox></object>
<object><name>2</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>80</xmax><ymax>40</ymax></bndbox></object>
<object><name>3</name><scene>1</scene><nobndbox>1</nobndbox></object></annotation>"""
BOX = (9, 11, 36, 30)  # pixels 9 .. 36, 11 .. 30 of 80 x 40, counted from 1: the red dog
SQUASHED = Preprocessing(32, None, (0, 0, 0), (1, 1, 1), "nearest")
CROPPED = Preprocessing(32, 32, (0, 0, 0), (1, 1, 1), "nearest")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A photo of 80 x 40 with a red rectangle, its captions, Entities' box of it and COCO's mask of it."""
    for name in ("Annotations", "Sentences"):
        (tmp_path / "entities" / name).mkdir(parents=True)
    (tmp_path / "entities/Sentences/17.txt").write_text(SENTENCES)
    (tmp_path / "entities/Annotations/17.xml").write_text(XML.format(*BOX))
    pixels = np.zeros((40, 80, 3), dtype=np.uint8)
    pixels[BOX[1] - 1 : BOX[3], BOX[0] - 1 : BOX[2]] = 255, 0, 0
    Image.fromarray(pixels).save(tmp_path / "17_abc.png")
    texts = ["a red dog on the grass", "nothing is marked here", "a dog that nobody marked"]
    sentences = [{"tokens": text.split(), "raw": text} for text in texts]
    images = [
        {"split": split, "filename": "17_abc.png", "imgid": n, "sentences": sentences}
        for n, split in enumerate(("train", "val", "test"))
    ]
    (tmp_path / "dataset.json").write_text(json.dumps({"images": images}))
    left, top, right, bottom = BOX[0] - 1, BOX[1] - 1, BOX[2], BOX[3]
    outline = [[left, top, right, top, right, bottom, left, bottom]]
    instances = {
        "images": [{"id": 5, "file_name": "17_abc.png", "width": 80, "height": 40}],
        "annotations": [{"image_id": 5, "category_id": 1, "segmentation": outline}],
        "categories": [{"id": 1, "name": "dog"}],
    }
    (tmp_path / "instances.json").write_text(json.dumps(instances))
    return tmp_path


def source(folder: Path, **options) -> KarpathySource:
    return KarpathySource(str(folder / "dataset.json"), str(folder), **options)


def red_cells(pixels: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Return the fraction of red pixels in each cell of an input (3, height, width) or (height, width, 3)."""
    red = (pixels[0] > 0.5) & (pixels[1] < 0.5)
    height, width = red.shape[0] // grid[0], red.shape[1] // grid[1]
    return red.reshape(grid[0], height, grid[1], width).mean(axis=(1, 3))


GRID = (4, 4)


@pytest.mark.parametrize("kind", ["entities", "instances"])
@pytest.mark.parametrize("preprocessing", [SQUASHED, CROPPED], ids=["squashed", "cropped"])
@pytest.mark.parametrize(("crop", "flip"), [(False, 0.0), (False, 1.0), (True, 0.5)])
def test_a_region_covers_the_red_pixels_of_the_input(folder, kind, preprocessing, crop, flip):
    options = (
        {"entities": str(folder / "entities")}
        if kind == "entities"
        else {"instances": [str(folder / "instances.json")]}
    )
    data = source(folder, **options)
    index, cells = data.index("train"), CellGrid.regular(GRID, preprocessing.size)
    regions = RegionsInView(data, "train", index, SimpleNamespace(preprocessing=preprocessing, cells=cells))
    vocabulary = Vocabulary.build(caption.split() for caption in index.captions)
    augmentation = Augmentation(random_crop=crop, flip=flip)
    for seed in range(4):
        options = {"augmentation": augmentation, "seed": seed, "regions": regions}
        dataset = CaptionDataset(index, vocabulary, preprocessing, **options)
        batch = dataset[[0, 1]]
        seen = red_cells(batch.images[0].numpy(), GRID)
        phrase = [[0, 0], [0, 1], [0, 2]]  # "a red dog"; the grass is all of the view, and is left out
        if seen.any():
            assert batch.region_steps.tolist() == phrase
            np.testing.assert_allclose(batch.regions.numpy(), [seen.ravel()] * 3, atol=0.13)  # rounding of the view
        else:
            assert batch.regions is None


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_regions_of_cached_features_are_mirrored_with_them(folder, flip):
    """A location's feature is the red part of its cell, so the features are the region."""
    data = source(folder, entities=str(folder / "entities"))
    index, cells = data.index("train"), CellGrid.regular(GRID, SQUASHED.size)
    regions = RegionsInView(data, "train", index, SimpleNamespace(preprocessing=SQUASHED, cells=cells))
    vocabulary = Vocabulary.build(caption.split() for caption in index.captions)
    image = index.image(0, SQUASHED)
    views = SQUASHED(image), SQUASHED(image, SQUASHED.mirrored_view(image.size))
    seen = [torch.from_numpy(red_cells(view.numpy(), GRID)).float().reshape(1, -1, 1) for view in views]
    plain, mirrored = (SimpleNamespace(gather=lambda rows, red=red: red[rows]) for red in seen)
    options = {"augmentation": Augmentation(flip=flip), "mirrored_features": mirrored, "regions": regions}
    dataset = CaptionDataset(index, vocabulary, SQUASHED, features=plain, **options)
    batch = dataset[[0]]
    assert not torch.allclose(*seen) and torch.equal(batch.annotations, seen[int(flip)])
    torch.testing.assert_close(batch.regions, batch.annotations[0].T.expand(3, -1), atol=0.13, rtol=0)


@pytest.mark.parametrize("stored", ["small", "squashed", "turned"])
def test_boxes_fit_an_image_that_is_stored_smaller_squashed_or_turned(folder, stored):
    path = folder / "17_abc.png"
    with Image.open(path) as image:
        if stored == "turned":  # stored lying on its side, with a mark that says so
            exif = Image.Exif()
            exif[ExifTags.Base.Orientation] = 6
            image.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)
        else:
            image.resize((40, 20) if stored == "small" else (32, 32), Image.Resampling.NEAREST).save(path)
    data = source(folder, entities=str(folder / "entities"))
    index, cells = data.index("val"), CellGrid.regular(GRID, CROPPED.size)
    regions = RegionsInView(data, "val", index, SimpleNamespace(preprocessing=CROPPED, cells=cells))
    (region, *_), *_ = regions.caption_regions(0)
    seen = red_cells(CROPPED(index.image(0, CROPPED)).numpy(), GRID)
    assert (region.start, region.end) == (0, 3)
    np.testing.assert_allclose(region.coverage, seen, atol=0.13)


def test_phrases_have_positions_in_the_captions_own_words(folder):
    data = source(folder, entities=str(folder / "entities"))
    lookup = data.phrases("train")
    captions = ["a red dog on the grass", "no such sentence", "a red-dog on the grass"]
    phrases, nothing, joined = lookup(folder / "17_abc.png", captions)
    assert [(phrase.start, phrase.end) for phrase in phrases] == [(0, 3), (4, 6)] and nothing == []
    assert [(phrase.start, phrase.end) for phrase in joined] == [(0, 2), (3, 5)]


def test_annotations_of_other_images_are_one_line(folder):
    (folder / "entities/Sentences/17.txt").unlink()
    with pytest.raises(InputError, match=r"entities: has no sentence of the first 1 images of the val split"):
        source(folder, entities=str(folder / "entities")).phrases("val")


def test_a_folder_without_annotations_is_refused_in_one_line(folder):
    with pytest.raises(InputError, match="has no folder Annotations; unpack"):
        source(folder, entities=str(folder / "nowhere")).phrases("val")


def test_a_tilde_is_the_home_folder_in_paths_of_annotations(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    data = KarpathySource("~/dataset.json", "~", entities="~/entities", instances=["~/instances.json"])
    assert data.phrases("train") is not None and data.objects("train") is not None
