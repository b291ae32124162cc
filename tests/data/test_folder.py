"""A folder of images with captions in JSON lines or CSV, and the errors of common mistakes in them."""

import json
import re

import pytest
import torch
from helpers import random_view
from PIL import Image

from captioning.data.folder import FolderSource, hashed_split
from captioning.data.loading import CaptionDataset
from captioning.data.transforms import Preprocessing
from captioning.errors import InputError
from captioning.vocabulary import Vocabulary

ROWS = [
    {"image": "a/1.jpg", "caption": "A cat, asleep."},
    {"image": "2.jpg", "caption": "Two dogs"},
    {"image": "a/1.jpg", "caption": "The cat sleeps"},
]
SPLITS = [{**row, "split": split} for row, split in zip(ROWS, ["train", "val", "train"], strict=True)]


def jsonl(root, rows):
    (root / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return FolderSource(str(root), captions="captions.jsonl")


def csv(root, text):
    (root / "captions.csv").write_text(text, encoding="utf-8")
    return FolderSource(str(root), captions="captions.csv")


def test_lines_are_grouped_by_image(tmp_path):
    source = jsonl(tmp_path, SPLITS)
    index = source.index("train")
    assert index.references(0) == ["a cat asleep", "the cat sleeps"]
    assert index.image_path(0) == tmp_path / "a" / "1.jpg" and len(index) == 1
    assert source.index("val").references(0) == ["two dogs"]
    assert source.index("val").image_ids.tolist() == [1]  # numbered over all splits


@pytest.mark.parametrize("spelling", ["./a/1.jpg", "a//1.jpg", "a/../a/1.jpg"])
def test_two_spellings_of_a_path_are_one_image(tmp_path, spelling):
    rows = [{"image": "a/1.jpg", "caption": "a cat"}, {"image": spelling, "caption": "one cat"}]
    split = hashed_split("a/1.jpg")
    index = jsonl(tmp_path, rows).index(split)
    assert (index.paths, index.captions) == (["a/1.jpg"], ["a cat", "one cat"])
    with pytest.raises(InputError, match=f"line 2: {re.escape(spelling)} is in the val split here, in train above"):
        jsonl(tmp_path, [row | {"split": name} for row, name in zip(rows, ("train", "val"), strict=True)]).index("val")


def test_csv_of_a_spreadsheet_equals_json_lines(tmp_path):
    text = '\ufeffsplit,image,caption,by\r\ntrain,a/1.jpg,"A cat, ""asleep"".",me\r\nval,2.jpg,Two dogs,me\r\n'
    text += 'train,a/1.jpg,"The cat\r\nsleeps",\r\n'
    for split in ("train", "val"):
        one, other = csv(tmp_path, text).index(split), jsonl(tmp_path, SPLITS).index(split)
        assert (one.captions, one.paths) == (other.captions, other.paths)


def test_the_split_column_may_be_empty_or_missing_or_name_a_folder(tmp_path):
    names = [f"{i}.jpg" for i in range(4)]
    splits = ["", "validation", "Train", ""]
    text = "".join(f"{name},a dog,{split}\n" for name, split in zip(names, splits, strict=True))
    rows = [
        {"image": name, "caption": "a dog", "split": split or None} for name, split in zip(names, splits, strict=True)
    ]
    for source in (csv(tmp_path, f"image,caption,split\n{text}"), jsonl(tmp_path, rows)):
        assert "1.jpg" in source.index("val").paths and "2.jpg" in source.index("train").paths


def test_one_caption_with_a_split_is_enough_for_its_image(tmp_path):
    name = next(f"{i}.jpg" for i in range(100) if hashed_split(f"{i}.jpg") == "train")
    rows = [{"image": name, "caption": "a dog"}, {"image": name, "caption": "a cat", "split": "val"}]
    for ordered in (rows, rows[::-1]):
        assert len(jsonl(tmp_path, ordered).index("val").captions) == 2


@pytest.mark.parametrize("named", ["val", "test"])
def test_a_split_that_the_column_names_gets_no_drawn_images(tmp_path, named):
    names = [f"{i}.jpg" for i in range(100)]
    text = "".join(f"{name},a dog,{named if name < '15' else ''}\n" for name in names)
    source = csv(tmp_path, f"image,caption,split\n{text}")
    (drawn,) = {"val", "test"} - {named}
    assert source.index(named).paths == [name for name in names if name < "15"]
    assert source.index(drawn).paths == [name for name in names if name >= "15" and hashed_split(name) == drawn]


def test_without_a_column_the_path_alone_decides_the_split(tmp_path):
    names = [f"{i:04d}.jpg" for i in range(1000)]
    source = jsonl(tmp_path, [{"image": name, "caption": "a"} for name in names])
    images = {split: set(source.index(split).paths) for split in ("train", "val", "test")}
    assert sorted(set.union(*images.values())) == names and sum(map(len, images.values())) == 1000
    assert 750 < len(images["train"]) < 850 and len(images["val"]) > 70 and len(images["test"]) > 70
    assert all(hashed_split(name) == split for split, members in images.items() for name in members)


def test_the_file_of_captions_has_a_usual_name_and_a_known_suffix(tmp_path):
    csv(tmp_path, "image,caption\na.jpg,a dog\n")
    assert FolderSource(str(tmp_path)).file.name == "captions.csv"
    (tmp_path / "captions.csv").rename(tmp_path / "Captions.CSV")
    assert FolderSource(str(tmp_path)).index("val" if hashed_split("a.jpg") == "val" else "train").paths == ["a.jpg"]
    with pytest.raises(InputError, match=r"captions\.xlsx: captions must be a \.jsonl, \.csv or \.txt file"):
        FolderSource(str(tmp_path), captions="captions.xlsx")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("captions.csv", 'image, caption, split\na/1.jpg, "A cat, asleep.", train\na/1.jpg,The cat sleeps , train\n'),
        ("captions.csv", "caption;image\nA cat, asleep.;a/1.jpg\nThe cat sleeps;a/1.jpg\n"),
        ("captions.txt", 'image\tcaption\na/1.jpg\t"A cat\t asleep."\na/1.jpg\tThe cat sleeps\n'),
        ("captions.txt", 'image,caption\na/1.jpg,"A cat, asleep ."\na/1.jpg,The cat sleeps\n'),
        ("captions.csv", 'Filename;Caption;Split\na/1.jpg;"A cat, asleep.";\na/1.jpg;The cat sleeps;\n'),
        (
            "metadata.jsonl",
            '{"file_name": "a/1.jpg", "text": "A cat, asleep."}\n{"file_name": "a/1.jpg", "text": "The cat sleeps"}\n',
        ),
        ("metadata.csv", 'file_name,text\na/1.jpg,"A cat, asleep."\na/1.jpg,The cat sleeps\n'),
        ("captions.csv", "image,caption,text,filename\na/1.jpg,A cat asleep.,x,y\na/1.jpg,The cat sleeps,x,y\n"),
    ],
)
def test_captions_in_the_formats_of_other_data_sets_are_read(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    index = FolderSource(str(tmp_path)).index("train" if "split" in text else hashed_split("a/1.jpg"))
    assert index.references(0) == ["a cat asleep", "the cat sleeps"] and index.paths == ["a/1.jpg"]


def test_a_file_of_captions_beside_the_folder_of_its_images_is_read(tmp_path):
    """As Kaggle has Flickr8k."""
    (tmp_path / "captions.txt").write_text("image,caption\n1.jpg,A dog .\n1.jpg,One dog .\n")
    (tmp_path / "Images").mkdir()
    source = FolderSource(str(tmp_path / "Images"), captions="../captions.txt")
    index = source.index(hashed_split("1.jpg"))
    assert index.image_path(0) == tmp_path / "Images/1.jpg" and index.references(0) == ["a dog", "one dog"]


@pytest.mark.parametrize("val", ["validation", "val", "valid", "Dev"])
@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "captions.csv"])
def test_a_split_is_that_of_its_folder_as_hugging_face_names_it(tmp_path, name, val):
    rows = [(f"{folder}/{i}.png", f"{folder} {i}") for folder in ("train", val, "test") for i in range(30)]
    text = "file_name,text\n" + "".join(f"{image},{caption}\n" for image, caption in rows)
    if name.endswith("jsonl"):
        text = "".join(json.dumps({"file_name": image, "text": caption}) + "\n" for image, caption in rows)
    (tmp_path / name).write_text(text)
    source = FolderSource(str(tmp_path))
    for split, folder in (("train", "train"), ("val", val), ("test", "test")):
        index = source.index(split)
        assert index.paths == [f"{folder}/{i}.png" for i in range(30)]
        assert index.captions == [f"{folder} {i}".lower() for i in range(30)]


def test_an_empty_split_is_one_line(tmp_path):
    source = csv(tmp_path, "image,caption\n1.jpg,a dog\n2.jpg,a cat\n")
    with pytest.raises(InputError, match=r"captions.csv: none of 2 images is in the val split; .* add images"):
        source.index("val")
    with pytest.raises(InputError, match=r"none of 3 images is in the test split; write it in the split column"):
        csv(tmp_path, "image,caption,split\n1.jpg,a,train\n2.jpg,a,val\n3.jpg,a,train\n").index("test")


def test_a_split_without_a_folder_takes_one_in_ten_of_the_training_images(tmp_path):
    names = [f"{folder}/{i}.jpg" for folder in ("train", "test") for i in range(200)]
    source = csv(tmp_path, "image,caption\n" + "".join(f"{name},a\n" for name in names))
    images = {split: source.index(split).paths for split in ("train", "val", "test")}
    assert images["test"] == names[200:] and {*images["train"], *images["val"]} == {*names[:200]}
    assert 10 < len(images["val"]) < 40 and all(hashed_split(name) == "val" for name in images["val"])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "captions.jsonl: missing; give the folder with captions.jsonl or .csv as root, or another file in it"),
        ({"captions.jsonl": "", "captions.csv": ""}, "has captions.csv and captions.jsonl; give captions"),
        (
            {"captions.csv": "image,words\na,b\n"},
            "line 1: one column must be called 'caption', got ['image', 'words']",
        ),
        (
            {"captions.csv": "image ,caption\n"},
            "line 1: one column must be called 'image', got ['image ', 'caption']",
        ),
        (
            {"captions.csv": "image,caption,caption\n"},
            "line 1: one column must be called 'caption', got ",
        ),
        ({"captions.csv": ""}, "line 1: one column must be called 'image', got []"),
        ({"captions.csv": "image,caption\n"}, "captions.csv: none of 0 images is in the train split; write"),
        (
            {"captions.csv": "image,caption\na.png,a dog, a cat\n"},
            "line 2: has 3 columns, .*a caption with ',' in quotes",
        ),
        ({"captions.csv": 'image,caption\na,b\nc,"d\ne,f\ng,h\n'}, "line 3: a quote that opens here is not closed"),
        ({"captions.csv": 'image,caption\na,"b\nc,"d"\n'}, "line 2: a quote that opens here is not closed"),
        ({"captions.csv": "image,caption\n1.jpg\n"}, "line 2: Object missing required field `caption`"),
        (
            {"captions.csv": "image,caption\na,b\nc,caf\xe9\n".encode("cp1252")},
            "is not in UTF-8 ('utf-8' codec can't decode byte 0xe9 in .*; save the file in UTF-8",
        ),
        ({"captions.csv": "image,caption\n".encode("utf-16")}, "is not in UTF-8 (.*; save the file in UTF-8"),
        (
            {"captions.csv": "image,caption,split\na.png,a dog,trian\n"},
            "'trian' - at `$.split`.*(train, val or test)",
        ),
        ({"captions.csv": "image,caption,split\na,a dog,train\na,a,val\n"}, "a is in the val split here, in train abo"),
        ({"captions.csv": "image,caption,split\na.png,a dog,val\n"}, "none of 1 images is in the train split; write"),
        (
            {"captions.csv": "image,caption\n4.jpg,a dog\n"},
            "1 images is in the train split; write it in the split column of some, or add images",
        ),
        ({"captions.jsonl": "{"}, "line 1: Input data was truncated"),
        ({"captions.jsonl": "[1]"}, "line 1: Expected `object`, got `array`"),
        ({"captions.jsonl": '{"caption": "a"}'}, "line 1: Object missing required field `image`"),
        ({"captions.jsonl": '{"image": "a", "caption": ["a", "b"]}'}, "line 1: Expected `str`, got `array`"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named_in_one_line(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as caught:
        FolderSource(str(tmp_path)).index("train")
    pattern = ".*".join(map(re.escape, message.split(".*")))
    assert re.search(pattern, str(caught.value)) and "\n" not in str(caught.value)


def test_photos_are_turned_as_their_cameras_marked_them(tmp_path):
    seen, exif = random_view(24, 40), Image.Exif()
    exif[0x0112] = 6  # stored lying on its left side: to be turned by 90 degrees clockwise
    stored = seen.transpose(Image.Transpose.ROTATE_90)
    stored.save(tmp_path / "2.png", exif=exif)
    source = jsonl(tmp_path, [{"image": "2.png", "caption": "two dogs", "split": "train"}])
    preprocessing = Preprocessing(20, 16, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    rows = source.index("train")
    (image,) = CaptionDataset(rows, Vocabulary(["two", "dogs"]), preprocessing, by_image=True)[[0]].images
    assert torch.equal(image, preprocessing(seen))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(InputError, match=r"gone: no such folder; .*gone/captions\.jsonl: missing; give the folder"):
        FolderSource(str(tmp_path / "gone")).index("train")
