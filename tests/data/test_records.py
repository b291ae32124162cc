"""The index of a split has the entries of its source, and names entries that cannot be used."""

import logging

import pytest

from captioning.data.records import CaptionIndex, CaptionSource, ImageEntry
from captioning.errors import InputError

ENTRIES = [
    ImageEntry(70, "a/x.jpg", ["a dog", "one  brown\tdog runs"]),
    ImageEntry(5, "b/ü.jpg", ["crème brûlée"]),
    ImageEntry(12, "z.jpg", ["a", "a", "the end of it all"]),
]
EVERYTHING = [
    (70, "root/a/x.jpg", ["a dog", "one brown dog runs"]),
    (5, "root/b/ü.jpg", ["crème brûlée"]),
    (12, "root/z.jpg", ["a", "a", "the end of it all"]),
]


def build(entries=ENTRIES, **options):
    return CaptionIndex.build("root", entries, **options)


def everything(index):
    images = range(len(index))
    return [(int(index.image_ids[i]), str(index.image_path(i)), index.references(i)) for i in images]


def test_an_index_has_its_images_and_captions_in_order():
    index = build()
    assert everything(index) == EVERYTHING
    assert index.caption_lengths.tolist() == [2, 4, 2, 1, 1, 5] and index.caption_image.tolist() == [0, 0, 1, 2, 2, 2]


def test_captions_without_words_and_images_without_captions_are_left_out_and_counted(caplog):
    entries = [ImageEntry(1, "1.jpg", ["", "a cat"]), ImageEntry(2, "2.jpg", [" "]), ImageEntry(3, "3.jpg", [])]
    with caplog.at_level(logging.WARNING):
        index = build(entries, origin="captions.json")
    assert everything(index) == [(1, "root/1.jpg", ["a cat"])]
    assert "captions.json: left out 2 captions without a word and 2 images without captions" in caplog.text


def test_an_image_that_appears_twice_is_refused_as_it_would_count_twice():
    with pytest.raises(InputError, match=r"^captions\.json: image 5 appears twice"):
        build([*ENTRIES, ImageEntry(5, "other.jpg", ["a"])], origin="captions.json")


def test_take_returns_the_first_images_alone():
    taken = build().take(2)
    assert everything(taken) == EVERYTHING[:2]
    assert len(taken.captions) == len(taken.caption_lengths) == len(taken.caption_image) == 3
    assert everything(build().take(9)) == EVERYTHING


def test_missing_image_files_are_named_with_their_annotation_file(tmp_path):
    index = CaptionIndex.build(tmp_path, [ImageEntry(i, f"{i}.jpg", ["a"]) for i in range(40)], origin="c.json")
    for i in range(40):
        (tmp_path / f"{i}.jpg").write_bytes(b"." * (i != 13))
    with pytest.raises(
        InputError,
        match=r'^c\.json: 1 of the 40 .* missing or empty, such as "\S*/13\.jpg"; see',
    ):
        index.check_images()
    (tmp_path / "13.jpg").write_text(".")
    index.check_images()


def test_the_name_of_a_missing_image_shows_a_space_at_its_end():
    with pytest.raises(InputError, match=r'^root: 2 of the 2 .*, such as "root/1\.jpg "; see data/README'):
        build([ImageEntry(i, name, ["a"]) for i, name in enumerate(["1.jpg ", "2.jpg"])]).check_images()


def test_an_incomplete_source_of_the_user_is_refused():
    with pytest.raises(TypeError, match=r"abstract.*\bindex\b"):
        CaptionSource()  # type: ignore[abstract]
