"""COCO's captions and objects, and the errors of common mistakes in their files."""

import json
import logging

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as run_lengths

from captioning.data.coco import CocoSource
from captioning.data.coco_nouns import CATEGORIES, plural, synonyms
from captioning.data.images import load_image
from captioning.errors import InputError
from captioning.evaluation.caption_files import read_references
from captioning.tokenizers import PennTreebank

IMAGES = [
    {"id": 9, "file_name": "000000000009.jpg", "height": 6, "width": 8},
    {"id": 25, "file_name": "000000000025.jpg", "height": 5, "width": 7},
]
CAPTIONS = [
    {"id": 1, "image_id": 25, "caption": "A giraffe, eating."},
    {"id": 2, "image_id": 9, "caption": "Soup isn't cold\n"},
    {"id": 3, "image_id": 25, "caption": "Two giraffes in the zoo"},
]
OBJECTS = [
    {"id": 1, "image_id": 9, "category_id": 51, "segmentation": [[2, 1, 6, 1, 6, 4, 2, 4]], "iscrowd": 0},
    {"id": 2, "image_id": 9, "category_id": 1, "segmentation": {"counts": [24, 6, 18], "size": [6, 8]}, "iscrowd": 1},
    {"id": 3, "image_id": 9, "category_id": 1, "segmentation": [], "iscrowd": 0},
]
CATEGORY_NAMES = [{"id": 1, "name": "person"}, {"id": 51, "name": "Bowl"}]


def write(root, name, **content):
    path = root / "annotations" / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture
def root(tmp_path):
    write(tmp_path, "captions_train2017.json", images=IMAGES, annotations=CAPTIONS, categories=CATEGORY_NAMES)
    write(tmp_path, "captions_val2017.json", images=IMAGES[:1], annotations=CAPTIONS[1:2])
    return tmp_path


def test_captions_are_tokenized_and_grouped_by_image(root):
    write(root, "captions_train2014.json", images=IMAGES, annotations=CAPTIONS)
    assert CocoSource(str(root), year=2014).index("train").image_path(0) == root / "train2014/000000000009.jpg"
    index = CocoSource(str(root)).index("train")
    assert index.image_ids.tolist() == [9, 25]
    assert index.references(0) == ["soup is n't cold"]
    assert index.references(1) == ["a giraffe eating", "two giraffes in the zoo"]
    assert index.image_path(1) == root / "train2017" / "000000000025.jpg"


def test_a_byte_order_mark_changes_nothing(root):
    for name in ("captions_val2017.json", "instances_val2017.json"):
        content = {"images": IMAGES, "annotations": CAPTIONS if "captions" in name else OBJECTS}
        path = write(root, name, **content, categories=CATEGORY_NAMES)
        path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    source = CocoSource(str(root))
    assert len(source.index("val").captions) == 3
    assert len(source.objects("val")(root / IMAGES[0]["file_name"])) == 2
    words = read_references(source.files("val")[0], split="val", tokenizer=source.tokenizer)
    assert words[9] == [["soup", "is", "n't", "cold"]]


def test_image_ids_may_be_far_apart(root):
    numbers = [9, 2**63 - 1]
    images = [{"id": number, "file_name": f"{number}.jpg"} for number in numbers]
    captions = [{"id": n, "image_id": number, "caption": f"a {n}"} for n, number in enumerate(numbers)]
    write(root, "captions_val2017.json", images=images, annotations=captions)
    index = CocoSource(str(root)).index("val")
    assert index.image_ids.tolist() == numbers and [index.references(row) for row in range(2)] == [["a 0"], ["a 1"]]


def test_the_validation_split_replaces_a_missing_test_split_with_a_warning(root, caplog):
    with caplog.at_level(logging.WARNING):
        index = CocoSource(str(root)).index("test")
    assert index.image_path(0) == root / "val2017" / "000000000009.jpg"
    assert "no test captions, the validation split stands in" in caplog.text


def test_another_file_of_test_captions_is_used_with_its_objects(root, caplog):
    write(root, "instances_val2017.json", images=IMAGES, annotations=OBJECTS, categories=CATEGORY_NAMES)
    folder = root / "held_out"
    write(folder, "captions_mine.json", images=IMAGES, annotations=CAPTIONS)
    other = [{**OBJECTS[0], "image_id": 25}]
    write(folder, "instances_mine.json", images=IMAGES, annotations=other, categories=CATEGORY_NAMES)
    source = CocoSource(str(root), test_captions="held_out/annotations/captions_mine.json")
    assert source.index("test").image_path(0) == root / "test2017" / "000000000009.jpg"
    paths = [root / image["file_name"] for image in IMAGES]
    assert [[len(source.objects(split)(path)) for path in paths] for split in ("val", "test")] == [[2, 0], [0, 1]]
    assert source.objects("train") is None
    assert not caplog.text


def test_only_the_test_split_may_have_images_without_captions(root):
    write(root, "image_info_test2017.json", images=IMAGES)
    write(root, "none.json", images=IMAGES, annotations=[])
    for name in ("image_info_test2017.json", "none.json"):
        index = CocoSource(str(root), test_captions=f"annotations/{name}").index("test")
        assert index.image_ids.tolist() == [9, 25] and not index.captions
        assert index.image_path(0) == root / "test2017" / "000000000009.jpg" and len(index.take(1)) == 1
    write(root, "captions_val2017.json", images=IMAGES)
    with pytest.raises(InputError, match="holds no image with a caption"):
        CocoSource(str(root)).index("val")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "missing; run captioning prepare coco --year 2017"),
        ('{"images": [{"id": 1', "not a COCO annotation file"),
        ({"images": [{"id": "1", "file_name": "x"}], "annotations": []}, "Expected `int`, got `str`"),
        ({"images": [{"id": 1}], "annotations": []}, "missing required field `file_name` - at `$.images[0]`"),
        ({"images": IMAGES[:1], "annotations": CAPTIONS}, "has a caption of image 25, but not the image"),
        ({"images": IMAGES, "annotations": [CAPTIONS[0] | {"caption": " ... "}]}, "holds no image with a caption"),
    ],
)
def test_a_captions_file_that_cannot_be_used_is_named_in_one_line(root, content, message):
    path = root / "annotations/captions_val2017.json"
    path.unlink()
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError, match=r"captions_val2017\.json: .*") as caught:
        CocoSource(str(root)).index("val")
    assert message in str(caught.value) and "\n" not in str(caught.value)


# Objects


def test_objects_have_their_category_and_their_pixels(root):
    """Polygons, plain run lengths and packed ones."""
    drawn = np.random.default_rng(0).random((5, 7)) < 0.5
    counts = run_lengths.encode(np.asfortranarray(drawn.astype(np.uint8)))["counts"].decode()
    packed = {"id": 4, "image_id": 25, "category_id": 1, "segmentation": {"size": [5, 7], "counts": counts}}
    write(root, "instances_val2017.json", images=IMAGES, annotations=[*OBJECTS, packed], categories=CATEGORY_NAMES)
    objects = CocoSource(str(root)).objects("val")
    paths = [root / image["file_name"] for image in IMAGES]
    bowl, crowd = objects(paths[0])
    assert (bowl.noun, crowd.noun, bowl.mask.dtype) == ("bowl", "person", bool)
    np.testing.assert_array_equal(bowl.mask, np.pad(np.ones((3, 4)), ((1, 2), (2, 2))))
    np.testing.assert_array_equal(crowd.mask, np.arange(8)[None].repeat(6, axis=0) == 4)  # runs go down the columns
    np.testing.assert_array_equal(objects(paths[1])[0].mask, drawn)
    assert objects(root / "1.jpg") == []


@pytest.mark.parametrize("orientation", [1, 2, 3, 6])
@pytest.mark.parametrize("drawn_upright", [False, True])
def test_masks_are_turned_upright_as_photos_are(root, orientation, drawn_upright):
    """COCO's masks fit the stored pixels; tools that annotate the upright image write its size."""
    stored = np.zeros((5, 7), dtype=np.uint8)
    stored[:2, 1:6] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = root / "val2017" / IMAGES[1]["file_name"]
    path.parent.mkdir()
    Image.fromarray(stored).save(path.with_suffix(".png"), exif=exif)
    path.with_suffix(".png").rename(path)
    seen = np.asarray(load_image(path))[..., 0] > 0
    mask = seen if drawn_upright and orientation == 6 else stored > 0
    counts = run_lengths.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"].decode()
    thing = {"image_id": 25, "category_id": 1, "segmentation": {"size": mask.shape, "counts": counts}}
    write(root, "instances_val2017.json", images=IMAGES, annotations=[thing], categories=CATEGORY_NAMES)
    np.testing.assert_array_equal(CocoSource(str(root)).objects("val")(path)[0].mask, seen)


def test_objects_have_plurals_and_synonyms_of_their_category(root):
    categories = [{"id": 1, "name": "my own thing"}, {"id": 51, "name": "dog"}]
    write(root, "instances_val2017.json", images=IMAGES, annotations=OBJECTS, categories=categories)
    dog, own = CocoSource(str(root)).objects("val")(root / IMAGES[0]["file_name"])
    assert {"dogs", "puppy", "puppies"} <= dog.synonyms
    assert own.synonyms == {"my own things"}


# Nouns


def test_no_name_belongs_to_two_categories_and_each_is_a_token_sequence():
    names = [name for category in CATEGORIES for name in {category, *synonyms(category)}]
    assert len(CATEGORIES) == 80 and len(set(names)) == len(names)
    assert [name for name in names if name != " ".join(PennTreebank().tokenize(name))] == []


def test_plurals_follow_english():
    singular = "tennis racket, bench, lady, boy, knife, policeman, human, computer mouse, sheep, wine glass"
    expected = "tennis rackets, benches, ladies, boys, knives, policemen, humans, computer mice, sheep, wine glasses"
    assert [plural(name) for name in singular.split(", ")] == expected.split(", ")


@pytest.mark.parametrize(
    ("category", "names"),
    [
        ("person", "man, women, boy, girls, people, player, children, bus driver"),
        ("bicycle", "bike, bikes, mountain bike"),
        ("dog", "puppies, baby dog"),
        ("bird", "geese, duck"),
        ("elephant", "baby elephant"),
        ("cell phone", "phone"),
    ],
)
def test_usual_words_name_their_category(category, names):
    assert set(names.split(", ")) <= synonyms(category)
