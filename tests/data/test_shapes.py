"""The shapes data set: what is on disk is true of the pixels, valid COCO, and the same every time."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from captioning.data.shape_world.drawing import LEAST_VISIBLE, paint
from captioning.data.shape_world.grammar import STYLES, SYNONYMS, describe
from captioning.data.shape_world.scene import COLOURS, NOUNS, SIZES, TEXTURES, Shape, relation, sample_scene
from captioning.data.shapes import ShapesSource
from captioning.errors import InputError
from captioning.tokenizers import tokenize
from captioning.vocabulary import Vocabulary

COUNTS = {"train": 30, "val": 20, "test": 3}


def make(root: Path, **options) -> ShapesSource:
    return ShapesSource(str(root), **{**COUNTS, **options})


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> ShapesSource:
    source = make(tmp_path_factory.mktemp("data") / "shapes")
    source.prepare()
    return source


@pytest.fixture(scope="module")
def instances(source) -> dict:
    return json.loads((source.root / "annotations/instances_train.json").read_text())


@pytest.fixture(scope="module")
def scenes() -> list:
    rng = np.random.default_rng(11)
    return [sample_scene(rng) for _ in range(400)]


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def shape(noun: str, colour: str, x: float, y: float, size: str = "small", texture: str = "plain") -> Shape:
    return Shape(noun, colour, texture, size, x, y, 11.0, 0.0, (0.0, 0.0, 0.0))


THREE = (shape("circle", "red", 20, 30), shape("square", "blue", 60, 40), shape("star", "orange", 75, 80))


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


def test_another_seed_gives_other_images(source, tmp_path):
    other = make(tmp_path / "other", seed=1)
    other.prepare()
    ours, theirs = files(source.root), files(other.root)
    assert ours.keys() == theirs.keys()
    assert all(ours[name] != theirs[name] for name in ours)


def test_a_larger_split_begins_with_the_smaller_one(source, tmp_path):
    larger = make(tmp_path / "larger", train=34)
    larger.prepare()
    ours, theirs = files(source.root), files(larger.root)
    assert all(theirs[name] == content for name, content in ours.items() if name.endswith(".png"))
    assert list(larger.index("train").captions)[: 5 * COUNTS["train"]] == list(source.index("train").captions)


def test_splits_share_no_image_and_no_id(source):
    pixels = [content for name, content in files(source.root).items() if name.endswith(".png")]
    assert len(set(pixels)) == len(pixels) == sum(COUNTS.values())
    ids = [i for split in COUNTS for i in source.index(split).image_ids.tolist()]
    assert len(set(ids)) == len(ids)


def test_index_lists_every_image_with_five_different_captions(source):
    for split, count in COUNTS.items():
        index = source.index(split)
        assert len(index) == count
        for i in range(count):
            assert index.image_path(i).is_file()
            assert len(set(index.references(i))) == STYLES
    assert source.index("val").image_path(0) == source.root / "val" / "000001.png"


@pytest.mark.parametrize("size", [64, 150])
def test_images_have_the_size_asked_for(tmp_path, size):
    source = make(tmp_path / "shapes", train=2, val=1, test=1, image_size=size)
    source.prepare()
    with Image.open(source.index("train").image_path(1)) as image:
        assert (image.mode, image.size) == ("RGB", (size, size))
    assert source.objects("train")(1)[0].mask.shape == (size, size)


def test_pycocotools_reads_masks_areas_and_boxes(source, capsys):
    from pycocotools import mask as coco_mask
    from pycocotools.coco import COCO

    coco = COCO(str(source.root / "annotations/instances_train.json"))
    assert [category["name"] for category in coco.loadCats(coco.getCatIds())] == list(NOUNS)
    for image_id in coco.getImgIds():
        annotations = coco.loadAnns(coco.getAnnIds(imgIds=image_id, iscrowd=False))
        objects = source.objects("train")(image_id)
        assert 1 <= len(annotations) == len(objects) <= 4
        for annotation, item in zip(annotations, objects, strict=True):
            runs = coco.annToRLE(annotation)
            with warnings.catch_warnings():  # pycocotools' decode is behind numpy 2
                warnings.simplefilter("ignore", DeprecationWarning)
                mask = coco_mask.decode(runs)
            assert (mask == item.mask).all()
            assert annotation["area"] == coco_mask.area(runs) == item.mask.sum()
            assert annotation["bbox"] == coco_mask.toBbox(runs).tolist()
            assert coco.cats[annotation["category_id"]]["name"] == item.noun
    capsys.readouterr()


def test_masks_of_one_image_do_not_overlap(source):
    for image_id in source.index("val").image_ids.tolist():
        assert np.sum([item.mask for item in source.objects("val")(image_id)], axis=0).max() == 1


def test_a_mask_lies_on_pixels_of_the_objects_colour(source, instances):
    hues = {"red": (255, 0, 0), "green": (0, 150, 0), "blue": (0, 60, 255), "yellow": (255, 240, 0)}
    checked = 0
    for annotation, item in _annotated(source, instances):
        words = annotation["attributes"]
        if len(words) == 2 and words[1] in hues:  # plain
            with Image.open(source.root / "train" / f"{annotation['image_id']:06d}.png") as image:
                mean = np.asarray(image, dtype=float)[item.mask].mean(axis=0)
            nearest = min(hues, key=lambda name: float(((mean - hues[name]) ** 2).sum()))
            assert nearest == words[1]
            checked += 1
    assert checked > 3


def test_lookup_knows_the_words_that_captions_use(source, instances):
    for annotation, item in _annotated(source, instances):
        size, colour, *texture = annotation["attributes"]
        assert size in SIZES and colour in COLOURS and texture in ([], *([name] for name in TEXTURES[1:]))
        assert item.attributes >= set(annotation["attributes"])
        assert ("big" in item.attributes) == ("large" in item.attributes)
        assert item.synonyms == ({SYNONYMS[item.noun]} if item.noun in SYNONYMS else frozenset())
    assert source.objects("train")(10**9) == []


def test_captions_name_the_objects_and_no_others(source):
    main = {synonym: word for word, synonym in SYNONYMS.items()}
    index = source.index("train")
    for row, image_id in enumerate(index.image_ids.tolist()):
        objects = sorted((item.noun, *(item.attributes & {*COLOURS})) for item in source.objects("train")(image_id))
        for caption in index.references(row):
            words = [main.get(word, word) for word in caption.split()]
            named = [(noun, before) for before, noun in itertools.pairwise(words) if noun in NOUNS]
            assert sorted(named) == objects


def test_stated_relations_hold_in_the_boxes(source):
    checked = Counter()
    main = {synonym: word for word, synonym in SYNONYMS.items()}
    index = source.index("train")
    for row, image_id in enumerate(index.image_ids.tolist()):
        centres = {}
        for item in source.objects("train")(image_id):
            y, x = np.nonzero(item.mask)
            (colour,) = item.attributes & {*COLOURS}
            centres[colour, item.noun] = ((x.min() + x.max()) / 2, (y.min() + y.max()) / 2)
        for caption in index.references(row):
            text = " ".join(main.get(word, word) for word in caption.split()).replace("to the ", "")
            said = r"(\w+) (\w+) (left of|right of|above|below) an? (?:[\w]+ )*?(\w+) (\w+)(?= |$)"
            for colour, noun, direction, other_colour, other in re.findall(said, text):
                if (colour, noun) in centres and (other_colour, other) in centres:
                    (ax, ay), (bx, by) = centres[colour, noun], centres[other_colour, other]
                    dx, dy = ax - bx, ay - by
                    lead = {"left of": -dx, "right of": dx, "above": -dy, "below": dy}[direction]
                    assert lead > (abs(dy) if direction in ("left of", "right of") else abs(dx)), caption
                    checked[direction] += 1
    assert checked.keys() == {"left of", "right of", "above", "below"}


def _annotated(source, instances):
    by_image: dict[int, list] = {}
    for annotation in instances["annotations"]:
        by_image.setdefault(annotation["image_id"], []).append(annotation)
    for image_id, of_image in by_image.items():
        yield from zip(of_image, source.objects("train")(image_id), strict=True)


# Making it


def test_prepare_leaves_a_finished_data_set_alone(source):
    before = (source.root / "shapes.json").stat().st_mtime_ns
    source.prepare()
    assert (source.root / "shapes.json").stat().st_mtime_ns == before


def test_an_interrupted_run_leaves_nothing_half_done(tmp_path, monkeypatch):
    source = make(tmp_path / "shapes")

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("captioning.data.shapes.paint", interrupt)
        with pytest.raises(KeyboardInterrupt):
            source.prepare()
    assert not source.root.exists()
    source.prepare()
    assert list(tmp_path.iterdir()) == [source.root]
    assert len(source.index("train")) == COUNTS["train"]


@pytest.mark.parametrize("other", [{"seed": 7}, {"image_size": 96}, {"train": 31}])
def test_shapes_made_with_other_arguments_are_refused(source, other):
    (key,) = other
    with pytest.raises(
        InputError, match=r"shapes\.json: these shapes were made with .* instead of .*another root"
    ) as e:
        make(source.root, **other).prepare()
    assert ("images" if key == "train" else key) in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_folder_that_is_not_a_shapes_data_set_is_left_alone(tmp_path, content):
    (tmp_path / "precious.txt").write_text("mine")
    if content is not None:
        (tmp_path / "shapes.json").write_text(content)
    with pytest.raises(
        InputError, match=r"shapes\.json: .*choose another root|these shapes were made with format None"
    ):
        make(tmp_path).prepare()
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_reading_before_preparing_says_what_to_run(tmp_path):
    with pytest.raises(InputError, match=r"captions_val\.json: missing; run captioning prepare shapes"):
        make(tmp_path / "none").index("val")


@pytest.mark.parametrize("content", ['{"images": [', "[]", '{"images": 3}'])
def test_a_broken_file_is_named(tmp_path, content):
    broken = make(tmp_path / "broken")
    (broken.root / "annotations").mkdir(parents=True)
    for kind in ("captions", "instances"):
        (broken.root / "annotations" / f"{kind}_val.json").write_text(content)
    for read in (broken.index, broken.objects):
        with pytest.raises(InputError, match=r"_val\.json: not a COCO annotation file \("):
            read("val")


@pytest.mark.parametrize("options", [{"train": 0}, {"val": 10**6}, {"image_size": 20}, {"seed": -1}])
def test_impossible_arguments_are_refused_by_name(tmp_path, options):
    with pytest.raises(InputError, match=next(iter(options))):
        make(tmp_path / "shapes", **options)


# Scenes


def test_scenes_leave_no_doubt_about_order_and_relations(scenes):
    for scene in scenes:
        shapes = scene.shapes
        assert len({(item.noun, item.colour) for item in shapes}) == len(shapes)
        assert all(b.x - a.x >= 10 for a, b in itertools.pairwise(shapes))
        related = {2: [(0, 1)], 3: [(0, 1), (1, 2)], 4: [(0, 1), (2, 3)]}.get(len(shapes), [])
        for a, b in related:
            dx, dy = shapes[a].x - shapes[b].x, shapes[a].y - shapes[b].y
            assert abs(abs(dx) - abs(dy)) >= 10
    assert {len(scene.shapes) for scene in scenes} == {1, 2, 3, 4}
    # Some scenes have objects of one noun, which only their colours tell apart.
    assert any(len({item.noun for item in scene.shapes}) < len(scene.shapes) for scene in scenes)


def test_scenes_use_everything_and_favour_nothing(scenes):
    shapes = [item for scene in scenes for item in scene.shapes]
    for words, used in [(NOUNS, "noun"), (COLOURS, "colour"), (TEXTURES, "texture"), (SIZES, "size")]:
        counts = Counter(getattr(item, used) for item in shapes)
        assert counts.keys() == set(words)
        assert max(counts.values()) < 4 * min(counts.values())
    directions = Counter(
        relation(a, b) for scene in scenes for a, b in zip(scene.shapes, scene.shapes[1:], strict=False)
    )
    assert directions.keys() == {"left", "above", "below"}


def test_every_object_stays_mostly_visible_and_inside(scenes):
    rng = np.random.default_rng(3)
    overlapping = 0
    for scene in scenes[:60]:
        painted = paint(scene, rng, 112)
        if painted is None:
            continue
        _, visible = painted
        edge = np.ones((112, 112), dtype=bool)
        edge[1:-1, 1:-1] = False
        assert not (visible & edge).any()
        for i, item in enumerate(scene.shapes):
            alone = paint(type(scene)((item,), (0,)), rng, 112)
            assert alone is not None
            fraction = visible[i].sum() / alone[1][0].sum()
            assert LEAST_VISIBLE <= fraction <= 1
            overlapping += fraction < 0.98
    assert overlapping > 0


# Wording


def test_captions_of_a_scene_read_as_expected():
    texts = [" ".join(describe(THREE, style)) for style in range(STYLES)]
    assert texts == [
        "a red circle left of a blue square above an orange star",
        "there is a red circle to the left of a blue square above an orange star",
        "the picture shows an orange star below a blue square right of a red circle",
        "we see a blue box with a red disc to its left and an orange star under it",
        "to the right of a red disc is a blue box over an orange star",
    ]


def test_the_size_is_said_of_one_or_two_objects_and_the_texture_of_all():
    one = (shape("ring", "pink", 90, 56, size="large", texture="dotted"),)
    assert " ".join(describe(one, 1)) == "there is a large dotted pink ring on the right of the picture"
    two = (shape("ring", "pink", 30, 80, size="large", texture="dotted"), shape("ring", "black", 45, 30))
    assert " ".join(describe(two, 3)) == "we see a big spotted pink hoop and a little black hoop over it"
    three = (shape("ring", "pink", 20, 80, texture="dotted"), *THREE[1:])
    assert " ".join(describe(three, 0)) == "a dotted pink ring below a blue square above an orange star"


def test_four_objects_are_all_mentioned_in_order():
    four = (*THREE, shape("heart", "purple", 95, 40))
    assert " ".join(describe(four, 0)) == ("a red circle left of a blue square and an orange star below a purple heart")
    assert " ".join(describe(four, 3)).startswith("from left to right we see a red disc a blue box an orange star")


def test_vocabulary_is_small_and_captions_are_short(scenes):
    texts = [describe(scene.shapes, style) for scene in scenes for style in range(STYLES)]
    vocabulary = {word for words in texts for word in words}
    assert 50 <= len(vocabulary) <= 60
    assert max(len(words) for words in texts) <= 24
    # Any other tokeniser of this project leaves the words alone.
    assert all(tokenize(" ".join(words)) == words for words in texts[::97])


def test_the_training_split_knows_every_word(scenes, tmp_path):
    texts = [list(describe(scene.shapes, style)) for scene in scenes for style in range(STYLES)]
    assert len(Vocabulary.build(texts[: len(texts) // 2], min_count=5)) == len(Vocabulary.build(texts))
