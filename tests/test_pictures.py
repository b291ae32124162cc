"""The examples of the captioner in the package: their sources, and the page that is made of them."""

import json

import pytest
from pictures import EXAMPLES, GALLERY, with_examples

CONTENT = json.loads((EXAMPLES / "examples.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("example", CONTENT, ids=lambda example: example["file"])
def test_an_example_photo_is_small_and_free_and_its_caption_is_judged(example):
    assert (EXAMPLES / example["file"]).stat().st_size <= 60_000
    assert example["credit"].endswith((", CC BY 2.0", ", CC0")) and example["source"].startswith("https://")
    assert set(example["wrong"]) <= set(example["caption"].split())


def test_every_photo_of_the_folder_is_an_example_and_the_last_one_of_the_app_is_difficult():
    assert {path.name for path in EXAMPLES.glob("*.jpg")} == {example["file"] for example in CONTENT}
    *others, last = [bool(example["wrong"]) for example in CONTENT if example["app"]]
    assert len(others) == 3 and not any(others) and last


def test_the_page_of_the_gallery_is_made_of_the_examples_and_counts_wrong_words():
    page = GALLERY.read_text(encoding="utf-8")
    assert with_examples(page, CONTENT) == page, "run python scripts/pictures.py --only gallery"
    two = [CONTENT[0] | {"caption": "a red cat", "wrong": ["red"]}, CONTENT[1] | {"caption": "a man", "wrong": []}]
    assert "Of these 2 captions, 1 are right. Of their 5 words, 1 are wrong." in with_examples(page, two)
    assert "| a <del>red</del> cat |" in with_examples(page, two)
