import time
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
    """The share of a batch's steps that are padding."""
    return 1 - lengths.sum() / sum(len(batch) * lengths[batch].max() for batch in batches)


@pytest.mark.parametrize("group", ["length", "image"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_caption_stands_once_in_an_epoch(group, world_size):
    data = captions(103)
    ranks = [list(sampler(data, rank=rank, world_size=world_size, group=group)) for rank in range(world_size)]
    drawn = list(chain.from_iterable(chain.from_iterable(ranks)))
    assert sorted(drawn) == list(range(len(data[0])))


@pytest.mark.parametrize("group", ["length", "image"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_have_the_same_number_of_batches(group, world_size):
    data = captions(101)
    samplers = [sampler(data, rank=rank, world_size=world_size, group=group) for rank in range(world_size)]
    assert {len(list(each)) for each in samplers} == {len(samplers[0])}


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
    each = sampler(captions(50))
    first, second = list(each), list(each)
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


def test_a_position_at_the_end_of_an_epoch_continues_with_the_next():
    data = captions(50)
    done = sampler(data)
    list(done)
    resumed = sampler(data)
    resumed.load_state_dict(done.state_dict())
    assert list(resumed) == list(done)
    assert resumed.epoch == 1


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
    steps = list(zip(*ranks, strict=True))
    assert len(steps) == len(whole) - 5
    repeated = 0
    for dealt, expected in zip(steps, whole[5:], strict=True):
        assert {batch.place for batch in dealt} == {expected.place}
        together = list(chain.from_iterable(dealt))
        assert set(together) == set(expected)
        repeated += len(together) > len(expected)
    assert repeated <= 1  # the short step, where it has fewer than one for each rank


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
    ],
)
def test_impossible_options_are_refused_by_name(options, message):
    with pytest.raises(InputError, match=message):
        sampler(captions(3), **options)


def test_nothing_to_sample_is_refused():
    with pytest.raises(InputError, match="no caption to sample"):
        sampler((np.empty(0), np.empty(0)))


def test_a_coco_sized_epoch_is_planned_in_a_fraction_of_a_second():
    data = captions(113_000)
    start = time.process_time()
    batches = sum(1 for _ in sampler(data, batch_size=64))
    assert batches > 8000
    assert time.process_time() - start < 1.5


SHARES = {"world_size": 4, "shares": 2, "batch_size": 8}


def by_share(data, image_share, **options):
    """Batches of each rank."""
    layout = SHARES | options
    return [list(sampler(data, image_share=image_share, rank=rank, **layout)) for rank in range(layout["world_size"])]


@pytest.fixture
def shared():
    """Two shares of which the second is a third smaller."""
    data = captions(150)
    return data, (np.arange(150) % 5 >= 3).astype(np.int64)


@pytest.mark.parametrize("group", ["length", "image"])
def test_ranks_of_a_share_see_its_images_alone_and_together_every_caption_once(shared, group):
    data, image_share = shared
    ranks = by_share(data, image_share, group=group)
    for rank, batches in enumerate(ranks):
        assert set(image_share[data[1][list(chain(*batches))]]) == {rank // 2}
    drawn = list(chain.from_iterable(chain.from_iterable(ranks)))
    assert sorted(drawn) == list(range(len(data[0])))
    assert len({len(batches) for batches in ranks}) == 1
    if group == "length":
        sizes = [[len(batch) for batch in batches] for batches in ranks]
        assert max(map(max, sizes)) == 8
        assert all(max(of_rank) - min(of_rank) <= 1 for of_rank in sizes)


def test_shares_work_on_like_lengths_at_the_same_step(shared):
    (lengths, _), _ = shared
    means = np.array([[lengths[batch].mean() for batch in rank] for rank in by_share(*shared)])
    assert np.ptp(means, axis=0).mean() < 0.25 * np.ptp(means)
    assert lengths[list(by_share(*shared)[0][0])].std() < lengths.std() / 2


@pytest.mark.parametrize("group", ["length", "image"])
def test_the_steps_of_shares_do_not_depend_on_how_many_ranks_a_share_has(shared, group):
    def steps(**options):
        ranks = by_share(*shared, group=group, **options)
        return [sorted(chain(*(rank[step] for rank in ranks))) for step in range(len(ranks[0]))]

    assert steps(batch_size=16) == steps(world_size=2, batch_size=32) == steps(world_size=8, batch_size=8)
    assert steps() != steps(seed=4)


def test_a_run_with_shares_goes_on_at_its_place_and_with_no_other_number_of_shares(shared):
    data, image_share = shared
    options = {**SHARES, "image_share": image_share}
    whole = [sampler(data, rank=3, **options) for _ in range(2)]
    first = [list(whole[0]), list(whole[0])]
    list(islice(whole[1], 3))
    resumed = sampler(data, rank=3, **options)
    resumed.load_state_dict(whole[1].state_dict())
    assert list(resumed) == first[0][3:] and list(resumed) == first[1]
    alone = sampler(data, world_size=4, batch_size=8)
    with pytest.raises(InputError, match=r"middle of epoch 0: shares 2 -> 1"):
        alone.load_state_dict(whole[1].state_dict())
    earlier = {name: value for name, value in sampler(data).state_dict(2).items() if name != "shares"}
    resumed = sampler(data)
    resumed.load_state_dict(earlier)  # as checkpoints had it before there were shares
    assert list(resumed) == list(sampler(data))[2:]


@pytest.mark.parametrize("group", ["length", "image"])
@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("batch_size", [1, 2, 5, 8])
def test_shares_of_small_batches_give_every_caption_once_or_are_refused(shared, group, world_size, batch_size):
    data, image_share = shared
    options = {"group": group, "world_size": world_size, "batch_size": batch_size}
    try:
        ranks = by_share(data, image_share, **options)
    except InputError:
        assert batch_size <= 5
        with pytest.raises(InputError, match="or take larger batches"):
            by_share(data, image_share, **options)
        return
    drawn = list(chain.from_iterable(chain.from_iterable(ranks)))
    assert set(drawn) == set(range(len(data[0])))
    assert len(drawn) - len(data[0]) <= (world_size - 1) * (1 if group == "length" else 5)


@pytest.mark.parametrize(
    ("image_share", "changes", "message"),
    [
        (np.zeros(150, np.int64), {}, r"share 1 of 2 has 0 captions for \d+ batches an epoch"),
        ((np.arange(150) > 148).astype(np.int64), {}, r"share 1 of 2 has [456] captions for"),
        ((np.arange(150) > 148).astype(np.int64), {"group": "image"}, "share 1 of 2 has 1 images for"),
        (np.arange(150) % 3, {"shares": 3}, "3 shares of the images cannot be divided among 4 processes"),
    ],
)
def test_shares_that_cannot_be_dealt_out_are_refused(image_share, changes, message):
    with pytest.raises(InputError, match=message):
        by_share(captions(150), image_share, **changes)


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
