"""Karpathy's split files, and the errors of common mistakes in them."""

import json

import pytest

from captioning.data.karpathy import KarpathySource
from captioning.errors import InputError
from captioning.tokenizers import Whitespace


def image(number, split, *captions, **more):
    sentences = [{"tokens": caption.split(), "raw": caption.title() + " ."} for caption in captions]
    return {"imgid": number, "split": split, "filename": f"{number}.jpg", "sentences": sentences, **more}


FLICKR = [image(0, "train", "a dog", "one dog runs"), image(1, "val", "a cat"), image(2, "train", "two dogs")]
COCO = [
    image(0, "restval", "a dog", filepath="val2014", cocoid=391895),
    image(1, "train", "a cat", filepath="train2014", cocoid=522418),
    image(2, "test", "a cow", filepath="val2014", cocoid=318219),
]


def source(folder, images, name="dataset_flickr8k.json"):
    (folder / name).write_text(json.dumps({"dataset": "x", "images": images}), encoding="utf-8")
    return KarpathySource(str(folder / name), str(folder / "images"))


def test_captions_are_the_tokens_of_the_file(tmp_path):
    index = source(tmp_path, FLICKR).index("train")
    assert index.image_ids.tolist() == [0, 2]
    assert index.references(0) == ["a dog", "one dog runs"]
    assert index.image_path(1) == tmp_path / "images" / "2.jpg"
    assert index.origin.endswith("dataset_flickr8k.json")


def test_tokens_with_punctuation_are_tokenized_again(tmp_path):
    text = "A man's “dog” cannot swim ."
    split_file = source(tmp_path, [image(0, "test", text, "a man s dog")])
    assert split_file.index("test").references(0) == [" ".join(split_file.tokenizer.tokenize(text)), "a man s dog"]


def test_another_tokenizer_reads_the_raw_texts(tmp_path):
    split_file = source(tmp_path, FLICKR)
    split_file.tokenizer = Whitespace()
    assert split_file.index("val").references(0) == ["A Cat ."]
    split_file.json_path.write_text(split_file.json_path.read_text().replace('"raw"', '"other"'))
    with pytest.raises(InputError, match="holds no image with a caption"):
        split_file.index("val")


def test_restval_belongs_to_train_and_coco_images_keep_their_id_and_folder(tmp_path):
    train = source(tmp_path, COCO).index("train")
    assert train.image_ids.tolist() == [391895, 522418]
    assert train.image_path(0) == tmp_path / "images" / "val2014" / "0.jpg"
    assert source(tmp_path, COCO).index("test").image_ids.tolist() == [318219]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([image(1, "train", "a dog")], "has no image of the val split; its splits are train"),
        ([{"split": "val", "imgid": 1}], "missing required field `filename`"),
        ([image(1, "val") | {"sentences": [{"raw": "a dog"}]}], "holds no image with a caption"),
        ([image(1, ["val"], "a dog")], "not a split file (Expected `str`, got `array`"),
    ],
)
def test_a_split_file_that_cannot_be_used_is_named_in_one_line(tmp_path, images, message):
    with pytest.raises(InputError, match=r"dataset_flickr8k\.json: ") as caught:
        source(tmp_path, images).index("val")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_named_with_the_command_that_gets_it(tmp_path):
    for name, remedy in (
        ("dataset_coco.json", "run captioning prepare coco --karpathy"),
        ("x.json", "see data/README"),
    ):
        with pytest.raises(InputError, match=rf"{name}: missing; {remedy}"):
            KarpathySource(str(tmp_path / name), "images").index("train")
