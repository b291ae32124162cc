"""The shapes data set: captions and masks fit the pixels, files are valid COCO, and a seed gives the same files."""

import hashlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from captioning.data.shape_world.scene import COLORS, NOUNS, STYLES, SYNONYMS, Shape, describe
from captioning.data.shapes import ShapesSource
from captioning.errors import InputError

MAIN_WORDS = {synonym: word for word, synonym in SYNONYMS.items()}
COUNTS = {"train": 30, "val": 20, "test": 3}


def make(root: Path, **options) -> ShapesSource:
    return ShapesSource(str(root), **{**COUNTS, **options})


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> ShapesSource:
    source = make(tmp_path_factory.mktemp("data") / "shapes")
    source.prepare()
    return source


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def shape(noun: str, color: str, x: float, y: float, size: str = "small", texture: str = "plain") -> Shape:
    return Shape(noun, color, texture, size, x, y, 11.0, 0.0, (0.0, 0.0, 0.0))


# What is on disk


def test_a_seed_gives_the_images_captions_and_boxes_that_published_numbers_were_measured_on(tmp_path):
    """If a digest changes on purpose, ``FORMAT`` changes, too, and docs/results.md is measured again."""
    source = make(tmp_path / "shapes", seed=3, image_size=96)
    source.prepare()
    images, texts = hashlib.sha256(), hashlib.sha256()
    for split in COUNTS:
        for row, image_id in enumerate(source.index(split).image_ids.tolist()):
            with Image.open(source.index(split).image_path(row)) as image:
                images.update(np.asarray(image).tobytes())
            texts.update(repr((image_id, source.index(split).references(row))).encode())
        texts.update((source.root / f"annotations/instances_{split}.json").read_bytes())
    assert (images.hexdigest()[:16], texts.hexdigest()[:16]) == ("551461dfc564f0e7", "1e995720be876b35")


def test_a_larger_split_begins_with_the_smaller_one(source, tmp_path):
    larger = make(tmp_path / "larger", train=34)
    larger.prepare()
    ours, theirs = files(source.root), files(larger.root)
    assert all(theirs[name] == content for name, content in ours.items() if name.endswith(".png"))
    assert list(larger.index("train").captions)[: 5 * COUNTS["train"]] == list(source.index("train").captions)


def test_splits_share_no_image_and_no_id_and_every_image_has_five_different_captions(source):
    pixels = [content for name, content in files(source.root).items() if name.endswith(".png")]
    assert len(set(pixels)) == len(pixels) == sum(COUNTS.values())
    indices = [source.index(split) for split in COUNTS]
    assert len({i for index in indices for i in index.image_ids.tolist()}) == sum(COUNTS.values())
    assert all(len(set(index.references(i))) == STYLES for index in indices for i in range(len(index)))


def test_pycocotools_reads_masks_areas_and_boxes(source, capsys):
    from pycocotools import mask as coco_mask
    from pycocotools.coco import COCO

    coco = COCO(str(source.root / "annotations/instances_train.json"))
    assert [category["name"] for category in coco.loadCats(coco.getCatIds())] == list(NOUNS)
    for image_id in coco.getImgIds():
        annotations = coco.loadAnns(coco.getAnnIds(imgIds=image_id, iscrowd=False))
        objects = source.objects("train")(source.root / "train" / coco.imgs[image_id]["file_name"])
        assert 1 <= len(annotations) == len(objects) <= 4
        for annotation, item in zip(annotations, objects, strict=True):
            runs = coco.annToRLE(annotation)
            assert (coco_mask.decode(runs) == item.mask).all()
            assert annotation["area"] == coco_mask.area(runs) == item.mask.sum()
            assert annotation["bbox"] == coco_mask.toBbox(runs).tolist()
            assert coco.cats[annotation["category_id"]]["name"] == item.noun
    capsys.readouterr()


def test_captions_name_the_objects_and_no_others(source):
    index, lookup = source.index("train"), source.objects("train")
    for row in range(len(index)):
        objects = sorted((item.noun, *(item.attributes & {*COLORS})) for item in lookup(index.image_path(row)))
        for caption in index.references(row):
            words = [MAIN_WORDS.get(word, word) for word in caption.split()]
            named = [(noun, before) for before, noun in itertools.pairwise(words) if noun in NOUNS]
            assert sorted(named) == objects
    assert lookup(source.root / "none.png") == []


# Making it


def test_two_runs_may_draw_the_same_shapes_at_once_and_leave_nothing_else(source, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: make(tmp_path / "shapes").prepare(), range(2)))
    assert list(tmp_path.iterdir()) == [tmp_path / "shapes"] and files(tmp_path / "shapes") == files(source.root)


@pytest.mark.parametrize("other", [{"seed": 7}, {"image_size": 96}, {"train": 31}])
def test_shapes_made_with_other_arguments_are_refused(source, other):
    name = "images" if "train" in other else next(iter(other))
    with pytest.raises(InputError, match=rf"shapes\.json: made with .*{name}.*, not .*another"):
        make(source.root, **other).prepare()


@pytest.mark.parametrize("content", ["{", "{}"])
def test_a_folder_with_another_shapes_json_is_not_overwritten(tmp_path, content):
    with pytest.raises(InputError, match=r"captions_val\.json: missing; run captioning prepare shapes"):
        make(tmp_path).index("val")
    (tmp_path / "shapes.json").write_text(content)
    with pytest.raises(InputError, match=r"shapes\.json: .*choose another root"):
        make(tmp_path).prepare()
    assert (tmp_path / "shapes.json").read_text() == content


@pytest.mark.parametrize("options", [{"train": 0}, {"val": 10**6}, {"image_size": 20}, {"seed": -1}])
def test_impossible_arguments_are_refused_by_name(tmp_path, options):
    with pytest.raises(InputError, match=next(iter(options))):
        make(tmp_path / "shapes", **options)


# Wording


THREE = (shape("circle", "red", 20, 30), shape("square", "blue", 60, 40), shape("star", "orange", 75, 80))
RING = shape("ring", "pink", 30, 80, size="large", texture="dotted")


@pytest.mark.parametrize(
    ("shapes", "style", "words"),
    [
        (THREE, 0, "a red circle left of a blue square above an orange star"),
        (THREE, 1, "there is a red circle to the left of a blue square above an orange star"),
        (THREE, 2, "the picture shows an orange star below a blue square right of a red circle"),
        (THREE, 3, "we see a blue box with a red disc to its left and an orange star under it"),
        (THREE, 4, "to the right of a red disc is a blue box over an orange star"),
        ([RING], 1, "there is a large dotted pink ring on the left of the picture"),  # the size of one or two objects
        ([RING, shape("ring", "black", 45, 30)], 3, "we see a big spotted pink hoop and a little black hoop over it"),
        ([RING, *THREE[1:]], 0, "a dotted pink ring below a blue square above an orange star"),
        ([*THREE, RING], 3, "from left to right we see a red disc a blue box an orange star and a spotted pink hoop"),
    ],
)
def test_captions_of_a_scene_read_as_expected(shapes, style, words):
    assert " ".join(describe(shapes, style)) == words
