"""Estimators against arithmetic by hand; that their gradients are right is shown in test_enumeration.py."""

import pytest
import torch
import torch.multiprocessing

from captioning.errors import InputError
from captioning.objective.estimators import ArcticMovingAverage, Estimator, LeaveOneOut, MovingAverage

N, T = 4, 3
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
REWARDS = -torch.tensor([[1.0, 2, 3], [4, 5, 0], [6, 7, 8], [9, 0, 0]])
TOTALS = torch.tensor([-6.0, -9, -21, -9])
ALL = MASK
SOME = MASK & torch.tensor([[True], [True], [False], [False]])

PAPER = {"per_step": False, "to_go": False}

ESTIMATORS = [
    Estimator(),
    MovingAverage(),
    MovingAverage(to_go=False),
    MovingAverage(**PAPER),
    LeaveOneOut(2),
    LeaveOneOut(2, to_go=False),
]


@pytest.mark.parametrize("estimator", [*ESTIMATORS, ArcticMovingAverage()], ids=lambda e: type(e).__name__)
def test_advantages_are_detached_and_zero_where_nothing_was_drawn(estimator):
    rewards = REWARDS.clone().requires_grad_()
    signal = estimator(rewards, MASK, SOME)
    assert not signal.advantages.requires_grad
    assert torch.equal(signal.drawn, SOME)
    assert (signal.advantages[~SOME] == 0).all()
    torch.testing.assert_close(signal.advantages[SOME], (signal.returns - signal.baseline)[SOME])


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
def test_a_batch_without_draws_gives_finite_zeros_and_moves_no_baseline(estimator):
    before = {name: value.clone() for name, value in estimator.state_dict().items()}
    signal = estimator(REWARDS, MASK, torch.zeros_like(MASK))
    assert (signal.advantages == 0).all()
    for name, value in estimator.state_dict().items():
        torch.testing.assert_close(value, before[name], equal_nan=True)


def test_without_a_baseline_every_step_gets_the_captions_log_probability():
    signal = Estimator()(REWARDS, MASK, ALL)
    torch.testing.assert_close(signal.advantages, TOTALS.unsqueeze(1) * MASK)


def test_the_papers_moving_average_starts_with_the_first_batch_and_keeps_nine_tenths():
    estimator = MovingAverage(**PAPER)
    first = estimator(REWARDS, MASK, ALL)
    mean = float(TOTALS.mean())
    torch.testing.assert_close(first.baseline, torch.zeros(N, T))  # the mean would depend on the draws
    assert float(estimator.averages) == pytest.approx(mean)
    second = estimator(2 * REWARDS, MASK, SOME)
    torch.testing.assert_close(second.baseline, torch.full((N, T), mean))  # b_{k-1}: it must not know the draws
    assert float(estimator.averages) == pytest.approx(0.9 * mean + 0.1 * 2 * float(TOTALS[:2].mean()))


def test_moving_average_of_the_authors_starts_at_zero_and_counts_the_mean_word_of_all_captions():
    estimator = ArcticMovingAverage()
    signal = estimator(REWARDS, MASK, SOME)
    means = TOTALS / MASK.sum(1)
    torch.testing.assert_close(signal.advantages, means.unsqueeze(1) * SOME)
    assert float(estimator.averages) == pytest.approx(0.1 * float(means.mean()))


def test_an_average_per_step_leaves_out_earlier_words():
    estimator = MovingAverage()
    assert not estimator(REWARDS, MASK, ALL).baseline.any()  # an average of this batch would depend on the draws
    signal = estimator(REWARDS, MASK, ALL)
    torch.testing.assert_close(signal.returns, -torch.tensor([[6.0, 5, 3], [9, 5, 0], [21, 15, 8], [9, 0, 0]]))
    averages = -torch.tensor([20 / 4, 14 / 3, 11 / 2])
    torch.testing.assert_close(signal.baseline[0], averages.flip(0).cumsum(0).flip(0))
    torch.testing.assert_close(signal.baseline[3], torch.tensor([averages[0], 0, 0]))


def test_every_step_has_its_average_and_steps_from_the_fiftieth_on_share_one():
    estimator = MovingAverage()
    estimator(REWARDS, MASK, ALL)
    torch.testing.assert_close(estimator.averages[:T], -torch.tensor([20 / 4, 14 / 3, 11 / 2]))
    first_steps = MASK & torch.tensor([True, False, False])
    estimator(REWARDS, first_steps, first_steps)
    torch.testing.assert_close(estimator.averages[:T], -torch.tensor([20 / 4, 14 / 3, 11 / 2]))
    estimator(3 * REWARDS, MASK, SOME)
    kept = torch.tensor([20 / 4, 14 / 3, 11 / 2])
    torch.testing.assert_close(estimator.averages[:T], -(0.9 * kept + 0.1 * torch.tensor([7.5, 10.5, 9])))
    exists = torch.ones(1, 52, dtype=torch.bool)
    estimator(-torch.arange(1.0, 53).unsqueeze(0), exists, exists)
    assert float(estimator.averages[-1]) == pytest.approx(-(50 + 51 + 52) / 3)


def test_an_average_per_step_of_whole_captions_knows_how_long_each_is():
    estimator = MovingAverage(to_go=False)
    estimator(REWARDS, MASK, ALL)
    signal = estimator(REWARDS, MASK, ALL)
    torch.testing.assert_close(signal.returns, TOTALS.unsqueeze(1).expand(N, T))
    torch.testing.assert_close(signal.baseline[1], torch.full((T,), -(20 / 4 + 14 / 3)))


def test_one_average_with_returns_to_go_is_refused():
    with pytest.raises(InputError, match="per_step: false needs to_go: false"):
        MovingAverage(per_step=False)


@pytest.mark.parametrize("samples", [1, 2.5])
def test_leave_one_out_needs_a_whole_number_of_two_draws_or_more(samples):
    with pytest.raises(InputError, match=f"LeaveOneOut.samples must be .*, got {samples}"):
        LeaveOneOut(samples)


def test_leave_one_out_compares_with_the_other_draws_of_the_same_caption():
    mask = torch.ones(6, 2, dtype=torch.bool)
    rewards = torch.tensor([[1.0, 2], [3, 4], [5, 9], [10, 20], [30, 40], [50, 60]])
    signal = LeaveOneOut(3, to_go=False)(rewards, mask, mask)
    totals = rewards.sum(1).tolist()
    others = [(sum(totals[k - k % 3 : k - k % 3 + 3]) - totals[k]) / 2 for k in range(6)]
    torch.testing.assert_close(signal.baseline[:, 0], torch.tensor(others))
    to_go = LeaveOneOut(3)(rewards, mask, mask)
    torch.testing.assert_close(to_go.baseline[:, 1], torch.tensor([6.5, 5.5, 3.0, 50.0, 40.0, 30.0]))


def follow(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    half = slice(2 * rank, 2 * rank + 2)
    for estimator in (MovingAverage(), MovingAverage(**PAPER)):
        for factor in (1, 2):
            signal = estimator(factor * REWARDS[half], MASK[half], ALL[half])
        torch.save((estimator.state_dict(), signal.baseline), f"{folder}/{len(estimator.averages)}-{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_every_process_follows_the_mean_over_all_of_them(tmp_path):
    torch.multiprocessing.spawn(follow, (str(tmp_path),), nprocs=2)
    for whole in (MovingAverage(), MovingAverage(**PAPER)):
        for factor in (1, 2):
            signal = whole(factor * REWARDS, MASK, ALL)
        for rank in range(2):
            state, baseline = torch.load(tmp_path / f"{len(whole.averages)}-{rank}")
            for name, value in whole.state_dict().items():
                torch.testing.assert_close(state[name], value, equal_nan=True)
            torch.testing.assert_close(baseline, signal.baseline[2 * rank : 2 * rank + 2])
