import json
import logging

import numpy as np
import pytest

from captioning.data.coco import CocoSource
from captioning.errors import InputError

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
CATEGORIES = [{"id": 1, "name": "person"}, {"id": 51, "name": "Bowl"}]


def write(root, name, **content):
    path = root / "annotations" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture
def root(tmp_path):
    write(tmp_path, "captions_train2017.json", images=IMAGES, annotations=CAPTIONS)
    write(tmp_path, "captions_val2017.json", images=IMAGES[:1], annotations=CAPTIONS[1:2])
    return tmp_path


def changed(root, *, images=IMAGES, annotations=CAPTIONS):
    write(root, "captions_train2017.json", images=images, annotations=annotations)
    return CocoSource(str(root))


def test_captions_are_tokenised_and_gathered_by_image(root):
    index = CocoSource(str(root)).index("train")
    assert index.image_ids.tolist() == [9, 25]
    assert index.references(0) == ["soup is n't cold"]
    assert index.references(1) == ["a giraffe eating", "two giraffes in the zoo"]
    assert index.image_path(1) == root / "train2017" / "000000000025.jpg"


def test_the_2014_files_are_read_from_their_own_folders(root):
    write(root, "captions_val2014.json", images=IMAGES, annotations=CAPTIONS)
    index = CocoSource(str(root), year=2014).index("val")
    assert index.image_path(0) == root / "val2014" / "000000000009.jpg"


def test_the_validation_split_stands_in_for_the_test_split_and_the_log_says_so(root, caplog):
    source = CocoSource(str(root))
    with caplog.at_level(logging.WARNING):
        index = source.index("test")
    assert index.image_path(0) == root / "val2017" / "000000000009.jpg"
    assert "no test captions, the validation split stands in" in caplog.text


def test_a_test_file_of_ones_own_is_used(root, caplog):
    write(root, "my_test.json", images=IMAGES, annotations=CAPTIONS)
    source = CocoSource(str(root), test_captions="annotations/my_test.json", test_images="mine")
    assert source.index("test").image_path(0) == root / "mine" / "000000000009.jpg"
    assert source.objects("test") is None
    assert not caplog.text


def test_reading_prints_nothing(root, capsys):
    CocoSource(str(root)).index("train")
    assert capsys.readouterr().out == ""


def test_categories_in_a_captions_file_do_no_harm(root):
    write(root, "captions_train2017.json", images=IMAGES, annotations=CAPTIONS, categories=CATEGORIES)
    assert len(CocoSource(str(root)).index("train")) == 2


def test_preparing_names_the_missing_file_and_the_command(root):
    CocoSource(str(root)).prepare()
    (root / "annotations" / "captions_val2017.json").unlink()
    with pytest.raises(InputError, match=r"captions_val2017\.json: missing; run captioning prepare coco"):
        CocoSource(str(root)).prepare()


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"images": [], "annotations": 3}'])
def test_a_file_in_another_layout_is_named(root, text):
    (root / "annotations" / "captions_train2017.json").write_text(text)
    with pytest.raises(InputError, match=r"captions_train2017\.json: not a COCO annotation file \("):
        CocoSource(str(root)).index("train")


@pytest.mark.parametrize("numbers", [(2**62, 7), (-1, 7), (-(2**63), 7)])
def test_numbers_of_images_are_far_apart_or_refused(root, numbers):
    images = [{"id": number, "file_name": f"{number}.jpg"} for number in numbers]
    captions = [{"id": n, "image_id": image["id"], "caption": f"a {n}"} for n, image in enumerate(images)]
    source = changed(root, images=images, annotations=captions)
    if min(numbers) < 0:
        with pytest.raises(InputError, match=rf"image ids must be in 0 .. 2\^63 - 1, got {numbers[0]}"):
            source.index("train")
    else:
        assert source.index("train").image_ids.tolist() == [*numbers]
        assert [source.index("train").references(row) for row in range(2)] == [["a 0"], ["a 1"]]


def test_objects_carry_their_category_and_their_pixels(root):
    write(root, "instances_val2017.json", images=IMAGES, annotations=OBJECTS, categories=CATEGORIES)
    source = CocoSource(str(root))
    bowl, crowd = source.objects("val")(9)
    assert (bowl.noun, crowd.noun) == ("bowl", "person")
    expected = np.zeros((6, 8), dtype=bool)
    expected[1:4, 2:6] = True
    assert bowl.mask.dtype == bool
    np.testing.assert_array_equal(bowl.mask, expected)
    np.testing.assert_array_equal(crowd.mask, np.arange(8)[None].repeat(6, axis=0) == 4)  # runs go down the columns
    assert source.objects("val")(25) == []
    assert source.objects("test") is source.objects("val")


def test_objects_of_a_category_come_as_one_with_what_else_names_them(root):
    objects = [
        {"id": 1, "image_id": 9, "category_id": 2, "segmentation": [[2, 1, 6, 1, 6, 4, 2, 4]], "iscrowd": 0},
        {"id": 2, "image_id": 9, "category_id": 2, "segmentation": [[4, 1, 8, 1, 8, 4, 4, 4]], "iscrowd": 0},
        {"id": 3, "image_id": 9, "category_id": 3, "segmentation": [[0, 0, 1, 0, 1, 1, 0, 1]], "iscrowd": 0},
    ]
    categories = [{"id": 2, "name": "dog"}, {"id": 3, "name": "my own thing"}]
    write(root, "instances_val2017.json", images=IMAGES, annotations=objects, categories=categories)
    dog, own = CocoSource(str(root)).objects("val")(9)
    assert dog.mask.sum() == 18 and dog.mask[1:4, 2:8].all()
    assert {"dogs", "puppy", "puppies"} <= dog.synonyms and "hot dog" in dog.decoys
    assert own.synonyms == {"my own things"} and not own.decoys


def test_the_objects_of_a_test_file_of_ones_own_are_not_those_of_the_validation_file(root):
    write(root, "instances_val2017.json", images=IMAGES, annotations=OBJECTS, categories=CATEGORIES)
    folder = root / "held_out"
    (folder / "annotations").mkdir(parents=True)
    other = [{**OBJECTS[0], "image_id": 25}]
    write(folder, "captions_val2017.json", images=IMAGES, annotations=CAPTIONS)
    write(folder, "instances_val2017.json", images=IMAGES, annotations=other, categories=CATEGORIES)
    source = CocoSource(str(root), test_captions="held_out/annotations/captions_val2017.json")
    assert [[len(source.objects(split)(number)) for number in (9, 25)] for split in ("val", "test")] == [[2, 0], [0, 1]]


def test_there_are_no_objects_without_an_instances_file(root):
    assert CocoSource(str(root)).objects("train") is None


def test_an_object_of_an_unknown_category_is_named(root):
    write(root, "instances_val2017.json", images=IMAGES, annotations=OBJECTS, categories=CATEGORIES[:1])
    with pytest.raises(
        InputError, match=r"instances_val2017\.json: object 1 is of category 51, which is not in the file"
    ):
        CocoSource(str(root)).objects("val")
