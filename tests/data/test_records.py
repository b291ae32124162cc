import logging
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing

from captioning.data.records import CaptionIndex, CaptionSource, ImageEntry, PackedStrings, check_split
from captioning.errors import InputError

ENTRIES = [
    ImageEntry(70, "a/x.jpg", ["a dog", "one  brown\tdog runs"]),
    ImageEntry(5, "b/ü.jpg", ["crème brûlée"]),
    ImageEntry(12, "z.jpg", ["a", "a", "the end of it all"]),
]


def build(entries=ENTRIES, **options):
    return CaptionIndex.build("root", entries, **options)


def everything(index):
    images = range(len(index))
    return [(int(index.image_ids[i]), str(index.image_path(i)), index.references(i)) for i in images]


def test_packed_strings_give_back_what_was_packed():
    strings = ["", "plain", "höher", "日本", "", "x y"]
    packed = PackedStrings.pack(strings)
    assert len(packed) == 6
    assert list(packed) == strings
    assert [packed[i] for i in range(6)] == strings
    assert packed[-1] == "x y"
    assert packed.blob.dtype == torch.uint8 and packed.offsets.dtype == torch.int64
    assert list(PackedStrings.pack([])) == []


@pytest.mark.parametrize("i", [2, -3])
def test_a_string_beyond_the_end_is_an_index_error(i):
    with pytest.raises(IndexError, match=f"string {i} of 2"):
        PackedStrings.pack(["a", "b"])[i]


def test_an_index_gives_back_images_and_captions_in_order():
    assert everything(build()) == [
        (70, "root/a/x.jpg", ["a dog", "one brown dog runs"]),
        (5, "root/b/ü.jpg", ["crème brûlée"]),
        (12, "root/z.jpg", ["a", "a", "the end of it all"]),
    ]


def test_the_columns_of_an_index_agree():
    index = build()
    assert index.caption_lengths.tolist() == [len(caption.split()) for caption in index.captions]
    assert index.caption_lengths.dtype == torch.int32
    assert index.first_caption.tolist() == [0, 2, 3, 6]
    assert index.caption_image.tolist() == [0, 0, 1, 2, 2, 2]
    assert index.caption_image.dtype == torch.int32


def test_captions_without_words_and_images_without_captions_are_left_out_and_counted(caplog):
    entries = [ImageEntry(1, "1.jpg", ["", "a cat"]), ImageEntry(2, "2.jpg", [" "]), ImageEntry(3, "3.jpg", [])]
    with caplog.at_level(logging.WARNING):
        index = build(entries, origin="captions.json")
    assert everything(index) == [(1, "root/1.jpg", ["a cat"])]
    assert "captions.json: left out 2 captions without a word and 2 images without captions" in caplog.text


def test_an_image_id_that_stands_twice_is_refused_by_name():
    with pytest.raises(InputError, match=r"^captions\.json: image 5 appears twice \(other\.jpg\)"):
        build([*ENTRIES, ImageEntry(5, "other.jpg", ["a"])], origin="captions.json")


def test_an_index_without_captions_is_refused():
    with pytest.raises(InputError, match=r"c\.json: holds no image with a caption"):
        build([], origin="c.json")


def test_take_gives_the_first_images_and_nothing_of_the_others():
    taken = build().take(2)
    assert everything(taken) == everything(build())[:2]
    assert len(taken.captions) == len(taken.caption_lengths) == len(taken.caption_image) == 3
    assert len(taken.captions.blob) == sum(len(caption.encode()) for caption in taken.captions)
    assert everything(build().take(9)) == everything(build())
    with pytest.raises(InputError, match="at least 1 image, got 0"):
        build().take(0)


def test_an_index_survives_pickling():
    assert everything(pickle.loads(pickle.dumps(build()))) == everything(build())


def test_a_copy_that_is_sent_to_a_worker_shares_the_memory_of_the_index():
    index = build().share_memory()
    received = pickle.loads(ForkingPickler.dumps(index))
    received.image_ids[0] = 999
    received.captions.blob[2] = ord("f")
    assert int(index.image_ids[0]) == 999
    assert index.captions[0] == "a fog"
    tensors = [index.paths.blob, index.captions.offsets, index.first_caption, index.caption_image]
    assert all(tensor.is_shared() for tensor in tensors)


def test_missing_image_files_are_found_by_a_sample(tmp_path):
    index = CaptionIndex.build(tmp_path, [ImageEntry(i, f"{i}.jpg", ["a"]) for i in range(40)], origin="c.json")
    for i in range(39):
        (tmp_path / f"{i}.jpg").touch()
    with pytest.raises(InputError, match=r"^c\.json: image 39 has no file: .*39\.jpg is missing \(1 of 5 checked\)"):
        index.check_images(sample=5)
    (tmp_path / "39.jpg").touch()
    index.check_images(sample=5)


def test_a_source_knows_no_objects_unless_it_says_so():
    assert CaptionSource().objects("val") is None


def test_an_unknown_split_is_refused():
    with pytest.raises(InputError, match="split must be one of train, val, test, got 'dev'"):
        check_split("dev")
