"""Files of captions for the COCO server, and files of references to compare them with."""

import json
from pathlib import Path

import pytest
from helpers_faults import command, refusal

from captioning.errors import InputError
from captioning.evaluation import caption_files
from captioning.evaluation.caption_files import CaptionedImage, read_results, write_results
from captioning.tokenizers import PennTreebank

ANNOTATIONS = [
    {"id": 1, "image_id": 7, "caption": "A dog runs, fast."},
    {"id": 2, "image_id": 9, "caption": "Two red cats sit on a mat"},
    {"id": 3, "image_id": 7, "caption": "The dog is running over grass"},
    {"id": 4, "image_id": 9, "caption": " . "},
    {"id": 5, "image_id": 8, "caption": "A bird in the sky"},
]


def read_references(path: Path, split: str = "test"):
    return caption_files.read_references(path, split=split, tokenizer=PennTreebank())


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("refs.json").write_text(json.dumps({"images": [], "annotations": ANNOTATIONS}))
    captions = [(9, 'Two "café" cats.'), (7, "a dog runs over grass")]
    images = [CaptionedImage(image_id=number, caption=caption, references=[]) for number, caption in captions]
    write_results(Path("results.json"), images)
    return tmp_path


def karpathy(split: str, image_id: int, *captions: str) -> dict:
    sentences = [{"tokens": caption.split()} for caption in captions]
    return {"imgid": image_id, "split": split, "filename": f"{image_id}.jpg", "sentences": sentences}


def test_results_are_written_as_the_toolkit_takes_them_and_read_back(folder):
    assert json.loads(Path("results.json").read_text())[0] == {"image_id": 9, "caption": 'Two "café" cats.'}
    assert read_results(Path("results.json")) == {9: 'Two "café" cats.', 7: "a dog runs over grass"}
    COCO = pytest.importorskip("pycocotools.coco").COCO
    coco = COCO()
    coco.dataset = {"images": [{"id": i} for i in (7, 8, 9)], "annotations": ANNOTATIONS, "info": {}}
    coco.createIndex()
    assert coco.loadRes("results.json").imgToAnns[9][0]["caption"] == 'Two "café" cats.'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "expected .* got `object`"),
        ("[]", "holds no caption"),
        ("[1", "cannot be read as JSON"),
        ('{"image_id": 1}\n{"image_id": 2}\n', "cannot be read as JSON .*; give a list as in predict_results.json$"),
        ('[{"image_id": 1, "caption": "a"}, {"caption": "b"}]', r"missing required field `image_id` - at `\$\[1\]`"),
        ('[{"image_id": "1", "caption": "a"}]', "Expected `int`, got `str`"),
        ('[{"image_id": 1, "caption": "a"}, {"image_id": 1, "caption": "a"}]', "image_id 1 has two captions"),
    ],
)
def test_a_results_file_that_breaks_the_schema_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message) as error:
        read_results(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_references_of_coco_are_tokenized_and_grouped_by_image(folder):
    words = read_references(Path("refs.json"))
    assert words.keys() == {7, 8, 9} and [len(words[i]) for i in (7, 8, 9)] == [2, 1, 1]
    assert words[7][0] == ["a", "dog", "runs", "fast"]


def test_references_of_karpathy_are_of_the_split_and_keep_their_tokens(tmp_path):
    path = tmp_path / "dataset.json"
    images = [karpathy("test", 3, "a dog s life", "x"), karpathy("val", 4, "b"), karpathy("restval", 5, "c")]
    path.write_text(json.dumps({"images": images}))
    words = {3: [["a", "dog", "s", "life"], ["x"]]}
    assert read_references(path) == words
    assert read_references(path, split="val") == {4: [["b"]]}
    assert read_references(path, split="train") == {5: [["c"]]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("image,caption\n", "cannot be read as JSON .*; give COCO's or Karpathy's JSON file$"),
        ("[]", "no references, expected COCO's annotations or Karpathy's images"),
        ('{"annotations": [{"image_id": 1, "caption": " . "}]}', "holds no caption"),
        ('{"annotations": [{"image_id": 1, "category_id": 3}]}', "missing required field `caption`"),
        (
            '{"images": [{"split": "val", "filename": "a.jpg", "sentences": []}]}',
            "has no image of the test split; its splits are val",
        ),
    ],
)
def test_a_file_without_references_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "refs.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message) as error:
        read_references(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_captions_are_paired_with_the_references_of_their_image(folder, capsys):
    options = "--references", "refs.json", "--json", "-"
    Path("said.json").write_text('[{"image_id": 9, "caption": "Two red cats."}, {"image_id": 8, "caption": "a bird"}]')
    command("evaluate", "--captions", "said.json", *options)
    printed = json.loads(capsys.readouterr().out)
    assert printed["images"] == 2 and printed["values"]["ROUGE-L"]["value"] > 50
    Path("more.json").write_text(json.dumps([{"image_id": image_id, "caption": "a"} for image_id in (7, 5, 6)]))
    problem = "more.json: 2 of 3 images have no references, among them image_id 5"
    assert problem in refusal(capsys, "evaluate", "--captions", "more.json", *options)
