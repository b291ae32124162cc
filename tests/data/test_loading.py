"""From records to batches: captions stay with their image and its augmentation, whichever process loads them."""

import numpy as np
import pytest
import torch
from helpers import write_features

from captioning.data.batch import CaptionBatch
from captioning.data.features import Features, features_key
from captioning.data.loading import CaptionDataset, batch_loader
from captioning.data.records import CaptionIndex
from captioning.data.sampler import CaptionBatches, image_batches
from captioning.data.shapes import ShapesSource
from captioning.data.transforms import Augmentation, Preprocessing
from captioning.errors import InputError
from captioning.vocabulary import Vocabulary

PREPROCESSING = Preprocessing(32, 24, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> CaptionIndex:
    source = ShapesSource(str(tmp_path_factory.mktemp("data") / "shapes"), train=6, val=1, test=1, image_size=48)
    source.prepare()
    return source.index("train")


@pytest.fixture(scope="module")
def vocabulary(index) -> Vocabulary:
    return Vocabulary.build(caption.split() for caption in index.captions)


def batches(index: CaptionIndex, dataset: CaptionDataset, epoch: int = 0, workers: int = 0, first: int = 0, **options):
    order = CaptionBatches(index.caption_lengths, index.caption_image, 7, 0, start=(epoch, first), **options)
    return list(batch_loader(dataset, order, num_workers=workers))


def texts(vocabulary: Vocabulary, batch: CaptionBatch) -> list[str]:
    return [" ".join(vocabulary.decode(ids[1:])) for ids in batch.captions.tolist()]


@pytest.mark.parametrize("group", ["length", "image"])
def test_every_caption_comes_once_an_epoch_beside_the_image_it_describes(index, vocabulary, group):
    seen = []
    for batch in batches(index, CaptionDataset(index, vocabulary, PREPROCESSING), group=group):
        assert batch.images.shape == (len(batch.index_rows), 3, 24, 24)
        assert len(set(batch.index_rows.tolist())) == len(batch.index_rows)  # an image stands once
        assert torch.equal(batch.image_ids, torch.from_numpy(index.image_ids)[batch.index_rows])
        for row, image in zip(batch.index_rows.tolist(), batch.images, strict=True):
            assert torch.equal(image, PREPROCESSING(index.image(row, PREPROCESSING)))
        for text, image in zip(texts(vocabulary, batch), batch.image_index.tolist(), strict=True):
            seen.append((int(batch.index_rows[image]), text))
    assert sorted(seen) == sorted((row, text) for row in range(len(index)) for text in index.references(row))


def test_evaluation_batches_hold_every_image_once_with_all_its_captions(index, vocabulary):
    dataset = CaptionDataset(index, vocabulary, PREPROCESSING, by_image=True)
    loaded = list(batch_loader(dataset, image_batches(6, 4)))
    assert [batch.index_rows.tolist() for batch in loaded] == [[0, 1, 2, 3], [4, 5]]
    assert loaded[1].image_index.tolist() == [0] * 5 + [1] * 5
    assert texts(vocabulary, loaded[1]) == [*index.references(4), *index.references(5)]
    assert loaded[1].lengths.tolist() == [len(text.split()) + 1 for text in texts(vocabulary, loaded[1])]
    unknown = CaptionDataset(index, Vocabulary(["a"]), PREPROCESSING, by_image=True)[[0, 1]]
    assert set(unknown.captions.flatten().tolist()) == {0, 1, 2, 3, 4}  # words outside the vocabulary are <unk>


def test_augmentation_depends_on_the_seed_epoch_and_batch_not_on_the_loading_process(index, vocabulary):
    def images(seed: int = 5, **options) -> list[torch.Tensor]:
        dataset = CaptionDataset(index, vocabulary, PREPROCESSING, augmentation=Augmentation(flip=0.5), seed=seed)
        return [batch.images for batch in batches(index, dataset, **options)]

    whole = images()
    for same, part in ((images(workers=1), whole), (images(first=2), whole[2:])):
        assert all(torch.equal(*pair) for pair in zip(part, same, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(whole, images(seed=6), strict=True))


@pytest.fixture(scope="module")
def sides(index, tmp_path_factory) -> tuple[Features, Features]:
    """Features that equal the row of their image, negative for its mirror image."""
    folder = tmp_path_factory.mktemp("features")
    numbers, sides = np.arange(6, 0, -1).reshape(6, 1, 1), []
    for mirrored in (False, True):
        name, identity = features_key("train", {"encoder": "x"}, mirrored=mirrored)
        values = np.broadcast_to(-numbers if mirrored else numbers, (6, 2, 3))
        write_features(folder, name, identity, index.paths[::-1], values)
        sides.append(Features(folder, name, identity, index.paths))
    return sides[0], sides[1]


def test_cached_features_replace_the_images(index, vocabulary, sides):
    dataset = CaptionDataset(index, vocabulary, PREPROCESSING, features=sides[0])
    for batch in batches(index, dataset, workers=1):
        assert batch.images is None and batch.annotations.dtype == torch.float16
        assert torch.equal(batch.annotations, (1 + batch.index_rows).half().view(-1, 1, 1).expand(-1, 2, 3))


def test_mirroring_is_one_choice_per_image_and_epoch(index, vocabulary, sides):
    def seen(epoch: int, flip: float, **options) -> list[set[float]]:
        kept = {"features": sides[0], "mirrored_features": sides[1], "augmentation": Augmentation(flip=flip)}
        dataset = CaptionDataset(index, vocabulary, PREPROCESSING, seed=4, **kept)
        loaded = batches(index, dataset, epoch, **options)
        return [set(batch.annotations.flatten().tolist()) for batch in loaded]

    epochs = [set.union(*seen(epoch, 0.5)) for epoch in range(8)]
    assert all(len({*map(abs, epoch)}) == len(epoch) == 6 for epoch in epochs)
    assert set.union(*epochs) == {*range(-6, 0), *range(1, 7)}
    assert seen(2, 0.5, workers=1, first=2) == seen(2, 0.5)[2:]
    assert set.union(*seen(0, 1.0)) == {*range(-6, 0)} and set.union(*seen(0, 0.0)) == {*range(1, 7)}


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_read_is_one_line_from_any_process(index, vocabulary, tmp_path, workers):
    gone = CaptionDataset(index.take(2), vocabulary, PREPROCESSING, by_image=True)
    gone.index.root = tmp_path
    with pytest.raises(InputError, match=r"^[^\n]*1\.png: no such image file$"):
        list(batch_loader(gone, image_batches(2, 1), num_workers=workers))
