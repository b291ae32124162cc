"""The order of batches: every caption once, equal over processes, and the rest after a resume."""

from itertools import chain

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from captioning.data.sampler import CaptionBatches, image_batches
from captioning.errors import InputError


def captions(images, seed=0):
    """Lengths and image rows of a data set with 4 to 6 captions an image and lengths distributed as in COCO."""
    random = np.random.default_rng(seed)
    caption_image = np.repeat(np.arange(images), random.integers(4, 7, size=images))
    lengths = np.clip(random.gamma(20, 0.52, size=len(caption_image)).round(), 5, 50).astype(np.int32)
    return lengths, caption_image


def batches_of(data, epoch=0, **options):
    sampler = CaptionBatches(*data, **{"batch_size": 16, "seed": 3, **options})
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize("group", ["length", "image"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_caption_comes_once_an_epoch_and_ranks_share_the_batches_of_one_process(group, world_size):
    data = captions(100)
    whole = batches_of(data, group=group, batch_size=32)
    assert sorted(chain.from_iterable(whole)) == list(range(len(data[0])))
    options = {"group": group, "batch_size": 32 // world_size, "world_size": world_size}
    ranks = [batches_of(data, rank=rank, **options) for rank in range(world_size)]
    repeated = 0
    for batches, expected in zip(zip(*ranks, strict=True), whole, strict=True):
        assert {batch.epoch_and_batch for batch in batches} == {expected.epoch_and_batch}
        global_batch = list(chain.from_iterable(batches))
        assert set(global_batch) == set(expected)
        repeated += len(global_batch) > len(expected)
    assert repeated <= 1  # the short batch, if it has fewer captions than there are ranks


def test_a_batch_with_fewer_captions_than_ranks_repeats_some():
    data = np.full(9, 7), np.arange(9)  # 9 captions in batches of 8: the short one has one caption for four ranks
    ranks = [batches_of(data, batch_size=2, rank=rank, world_size=4) for rank in range(4)]
    drawn = list(chain.from_iterable(chain.from_iterable(ranks)))
    assert set(drawn) == set(range(9)) and len(drawn) == 9 + 3 and {len(batches) for batches in ranks} == {2}


def test_batches_hold_captions_of_like_length_in_random_order():
    data = captions(2000)
    batches = batches_of(data)
    assert np.mean([len(set(data[0][batch])) == 1 for batch in batches]) > 0.9
    means = [data[0][batch].mean() for batch in batches]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2


def test_the_order_of_batches_is_that_of_earlier_versions():
    lengths, images = np.array([5, 6, 5, 7, 6, 5, 8]), np.array([0, 0, 1, 1, 2, 2, 2])
    by_length = [batches_of((lengths, images), epoch, batch_size=3, seed=1) for epoch in (0, 1)]
    assert by_length == [[[6], [5, 0, 2], [1, 4, 3]], [[4, 3, 6], [2, 5, 1], [0]]]
    by_image = batches_of((lengths, images), 1, batch_size=3, seed=1, group="image", captions_per_image=2)
    assert by_image == [[2, 3], [6, 4, 0, 1]]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("group", ["length", "image"])
def test_a_resumed_sampler_yields_the_rest_of_its_epoch_and_then_whole_epochs(group, workers):
    """Through a loader, whose processes request batches before the trainer sets the epoch."""
    data = captions(20)
    sampler = CaptionBatches(*data, batch_size=16, seed=3, group=group, start=(1, 3))
    options = {"num_workers": workers, "persistent_workers": bool(workers)}
    loader = DataLoader(Echo(), sampler=sampler, batch_size=None, **options)
    rest = iter(loader)
    sampler.set_epoch(1)
    assert list(rest) == batches_of(data, 1, group=group)[3:]
    sampler.set_epoch(2)
    assert list(loader) == batches_of(data, 2, group=group)
    assert len(loader) == len(sampler) == len(batches_of(data, group=group))


class Echo(Dataset):
    def __getitem__(self, numbers):
        return numbers


def test_an_epoch_takes_the_next_captions_of_every_image():
    """Images have 4 to 6 captions: with 3 of them in an epoch, two epochs see all, and none is drawn twice in one."""
    lengths, caption_image = captions(200)
    options = {"group": "image", "captions_per_image": 3, "batch_size": 30}
    epochs = [batches_of((lengths, caption_image), epoch, **options) for epoch in (0, 1)]
    assert sum(len(set(caption_image[batch])) for batch in epochs[0]) == 200  # an image's captions stay together
    assert [sorted(map(len, epoch)) for epoch in epochs] == [[30] * 20] * 2
    drawn = [list(chain.from_iterable(epoch)) for epoch in epochs]
    for epoch in drawn:
        assert np.array_equal(np.bincount(caption_image[epoch]), np.full(200, 3)) and len(set(epoch)) == 600
    assert set(drawn[0]) | set(drawn[1]) == set(range(len(lengths)))


def test_captions_per_image_need_the_group_of_images():
    with pytest.raises(InputError, match="captions_per_image: needs group image, got length"):
        batches_of(captions(3), captions_per_image=2)


@pytest.mark.parametrize("images", [0, 1, 7, 20, 21])
@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_evaluation_splits_the_batches_of_one_process_over_ranks_and_repeats_the_last(images, batch_size, world_size):
    whole = image_batches(images, batch_size)
    assert list(chain.from_iterable(whole)) == list(range(images))
    assert all(len(batch) == batch_size for batch in whole[:-1])
    ranks = [image_batches(images, batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert {len(rank) for rank in ranks} == {-(-len(whole) // world_size)}
    dealt = [batch for rank in ranks for batch in rank]
    assert dealt[: len(whole)] == whole
    assert all(batch == whole[-1] for batch in dealt[len(whole) :])
