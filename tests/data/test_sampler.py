from itertools import chain, islice

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from captioning.data.sampler import CaptionBatchSampler, ImageBatchSampler
from captioning.errors import InputError


def captions(images, seed=0):
    """Lengths and image rows of a data set with 4 to 6 captions an image and lengths distributed as in COCO."""
    random = np.random.default_rng(seed)
    caption_image = np.repeat(np.arange(images), random.integers(4, 7, size=images))
    lengths = np.clip(random.gamma(20, 0.52, size=len(caption_image)).round(), 5, 50).astype(np.int32)
    return lengths, caption_image


def sampler(data, **options):
    return CaptionBatchSampler(*data, **{"batch_size": 16, "seed": 3, **options})


def padding(batches, lengths):
    """The fraction of the steps of batches that is padding."""
    return 1 - lengths.sum() / sum(len(batch) * lengths[batch].max() for batch in batches)


def test_at_most_one_caption_per_other_rank_is_repeated_where_a_step_has_too_few():
    data = np.full(9, 7), np.arange(9)  # 9 captions in steps of 8: the short step has one caption for four ranks
    ranks = [list(sampler(data, batch_size=2, rank=rank, world_size=4)) for rank in range(4)]
    drawn = list(chain.from_iterable(chain.from_iterable(ranks)))
    assert set(drawn) == set(range(9))
    assert len(drawn) == 9 + 3
    assert {len(batches) for batches in ranks} == {2}


def test_batches_are_full_but_one():
    data = captions(101)
    sizes = [len(batch) for batch in sampler(data)]
    assert sorted(sizes)[1:] == [16] * (len(sizes) - 1)
    assert min(sizes) == len(data[0]) % 16


def test_batches_hold_captions_of_like_length():
    data = captions(2000)
    batches = list(sampler(data))
    assert padding(batches, data[0]) < 0.005
    assert np.mean([len(set(data[0][batch])) == 1 for batch in batches]) > 0.9
    shuffled = np.random.default_rng(0).permutation(len(data[0]))
    assert padding(np.array_split(shuffled, len(batches)), data[0]) > 0.2  # what it saves


def test_ranks_work_on_like_lengths_at_the_same_step():
    data = captions(2000)
    ranks = [list(sampler(data, rank=rank, world_size=4)) for rank in range(4)]
    longest = np.array([[data[0][batch].max() for batch in batches] for batches in ranks])  # (ranks, steps)
    difference = longest.max(axis=0) - longest.min(axis=0)
    assert np.median(difference) == 0 and difference.mean() < 0.2


def test_lengths_come_in_random_order():
    data = captions(1000)
    means = [data[0][batch].mean() for batch in sampler(data)]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2


def test_the_same_seed_gives_the_same_order_and_another_seed_another():
    data = captions(50)
    assert list(sampler(data, seed=1)) == list(sampler(data, seed=1))
    assert list(sampler(data, seed=1)) != list(sampler(data, seed=2))


def test_epochs_differ_in_order_and_in_which_captions_meet():
    order = sampler(captions(50))
    first, second = list(order), list(order)
    assert first != second
    assert {frozenset(batch) for batch in first}.isdisjoint({frozenset(batch) for batch in second})


@pytest.mark.parametrize("group", ["length", "image"])
def test_a_restored_position_continues_the_very_sequence(group):
    data = captions(50)
    whole = sampler(data, group=group)
    expected = [list(whole) for _ in range(3)]
    stopped = sampler(data, group=group)
    list(stopped)
    seen = list(islice(iter(stopped), 5))
    assert seen == expected[1][:5]
    resumed = sampler(data, group=group)
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.resumes_at == 5
    assert list(resumed) == expected[1][5:]
    assert resumed.resumes_at == 0
    assert list(resumed) == expected[2]


def test_a_position_counts_what_was_trained_on_rather_than_drawn():
    data = captions(50)
    ahead = sampler(data)
    drawn = list(islice(iter(ahead), 9))
    resumed = sampler(data)
    resumed.load_state_dict(ahead.state_dict(batches_done=4))
    assert next(iter(resumed)) == drawn[4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 8}, "batch_size 16 -> 8"),
        ({"seed": 4}, "seed 3 -> 4"),
        ({"world_size": 2}, "world_size 1 -> 2; with 2 processes, batch_size 8 goes on at the same place"),
        ({"world_size": 3}, "world_size 1 -> 3; use the old values"),
        ({"group": "image"}, "group length -> image"),
    ],
)
def test_a_position_in_the_middle_of_another_layout_is_refused_by_name(change, message):
    data = captions(50)
    old = sampler(data)
    next(iter(old))
    with pytest.raises(InputError, match=f"middle of epoch 0: {message}"):
        sampler(data, **change).load_state_dict(old.state_dict())
    sampler(data, **change).load_state_dict(old.state_dict(batches_done=0))  # between epochs nothing is lost


@pytest.mark.parametrize("group", ["length", "image"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_run_goes_on_with_more_ranks_at_the_same_place_with_the_same_captions_in_each_step(group, world_size):
    data = captions(100)
    old = sampler(data, group=group, batch_size=32)
    whole = list(old)
    ranks = [
        sampler(data, group=group, batch_size=32 // world_size, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.load_state_dict(old.state_dict(batches_done=5))
    repeated = 0
    for step, expected in zip(zip(*ranks, strict=True), whole[5:], strict=True):
        assert {batch.place for batch in step} == {expected.place}
        captions_of_step = list(chain.from_iterable(step))
        assert set(captions_of_step) == set(expected)
        repeated += len(captions_of_step) > len(expected)
    assert repeated <= 1  # the short step, if it has fewer captions than there are ranks


class Echo(Dataset):
    def __getitem__(self, numbers):
        return numbers


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_draws_each_epoch_once(workers):
    data = captions(20)
    loader = DataLoader(
        Echo(), sampler=sampler(data), batch_size=None, num_workers=workers, persistent_workers=bool(workers)
    )
    reference = sampler(data)
    assert [list(loader) for _ in range(2)] == [list(reference) for _ in range(2)]


def test_all_captions_of_an_image_stay_together_when_grouped_by_image():
    lengths, caption_image = captions(200)
    batches = list(sampler((lengths, caption_image), group="image", batch_size=30))
    owners = [set(caption_image[batch]) for batch in batches]
    assert sum(map(len, owners)) == 200
    assert abs(np.mean([len(batch) for batch in batches[:-1]]) - 30) < 4


def test_an_epoch_takes_the_next_captions_of_every_image():
    """Images have 4 to 6 captions: with 3 of them in an epoch, two epochs see all, and none is drawn twice in one."""
    lengths, caption_image = captions(200)
    few = sampler((lengths, caption_image), group="image", captions_per_image=3, batch_size=30)
    epochs = [list(few) for _ in range(2)]
    assert sorted(map(len, epochs[0]))[1:] == [30] * (len(few) - 1) == [30] * 19
    drawn = [list(chain.from_iterable(epoch)) for epoch in epochs]
    for epoch in drawn:
        assert np.array_equal(np.bincount(caption_image[epoch]), np.full(200, 3)) and len(set(epoch)) == 600
    assert set(drawn[0]) | set(drawn[1]) == set(range(len(lengths)))
    everything = sampler((lengths, caption_image), group="image", captions_per_image=6)
    assert sorted(chain.from_iterable(everything)) == list(range(len(lengths)))


def test_a_position_within_an_epoch_of_all_captions_is_none_of_few():
    data = captions(50)
    old = sampler(data, group="image")
    next(iter(old))
    state = old.state_dict()
    with pytest.raises(InputError, match="middle of epoch 0: captions_per_image None -> 2"):
        sampler(data, group="image", captions_per_image=2).load_state_dict(state)
    del state["captions_per_image"]  # of an earlier version
    sampler(data, group="image").load_state_dict(state)


def test_images_may_own_captions_that_do_not_lie_side_by_side():
    lengths, caption_image = np.array([5, 6, 7, 8]), np.array([1, 0, 1, 0])
    batches = list(sampler((lengths, caption_image), group="image", batch_size=2))
    assert sorted(map(sorted, batches)) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"rank": 2, "world_size": 2}, r"rank must be in 0 \.\. 1, got 2"),
        ({"group": "size"}, "group must be length or image, got 'size'"),
        ({"captions_per_image": 2}, "captions_per_image: needs group image, got length"),
        ({"group": "image", "captions_per_image": 0}, "captions_per_image must be at least 1, got 0"),
    ],
)
def test_impossible_options_are_refused_by_name(options, message):
    with pytest.raises(InputError, match=message):
        sampler(captions(3), **options)


def test_nothing_to_sample_is_refused():
    with pytest.raises(InputError, match="no caption to sample"):
        sampler((np.empty(0), np.empty(0)))


@pytest.mark.parametrize("num_images", [0, 1, 7, 20, 21])
@pytest.mark.parametrize("batch_size", [1, 3, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_evaluation_deals_out_the_batches_of_one_process_and_repeats_the_last_where_they_run_out(
    num_images, batch_size, world_size
):
    whole = list(ImageBatchSampler(num_images, batch_size))
    assert list(chain.from_iterable(whole)) == list(range(num_images))
    assert all(len(batch) == batch_size for batch in whole[:-1])
    ranks = [ImageBatchSampler(num_images, batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert {len(rank) for rank in ranks} == {-(-len(whole) // world_size)}
    dealt = [batch for rank in ranks for batch in rank]
    assert dealt[: len(whole)] == whole
    assert all(batch == whole[-1] for batch in dealt[len(whole) :])
