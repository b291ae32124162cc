"""Resampling against sacrebleu, against enumeration, and against what the theory promises."""

import itertools
import random

import numpy as np
import pytest

from captioning.metrics.arrays import percentage
from captioning.metrics.bleu import bleu_counts, bleu_from_counts
from captioning.metrics.resampling import Difference, Interval, bootstrap, differences, holm, intervals


def corpus(images: int = 60, seed: int = 0):
    """Return references, a system, and a better one, which has a word of the reference more often."""
    draw = random.Random(seed)
    references = [[[draw.choice("abcdefgh") for _ in range(8)] for _ in range(3)] for _ in range(images)]

    def system(skill: float):
        return [
            [word if draw.random() < skill else draw.choice("abcdefgh") for word in refs[0][: draw.randint(6, 8)]]
            for refs in references
        ]

    return references, system(0.6), system(0.7)


def test_exchanges_without_a_score_are_left_out():
    """One noun each, on different images: half of the exchanges give both to one system; all others are as large."""
    first, second = np.zeros((2, 2)), np.zeros((2, 2))
    first[0], second[1] = (0, 1), (1, 1)  # right, of
    (test,) = differences(first, second, percentage)
    assert test.p_value == 1


def bleu4(counts):
    return bleu_from_counts(counts)[..., 3]


def test_the_bootstrap_interval_is_sacrebleus():
    bleu = pytest.importorskip("sacrebleu").metrics.BLEU(tokenize="none", smooth_method="none", force=True)
    references, system, _ = corpus()
    hypotheses, *streams = ([" ".join(words) for words in texts] for texts in (system, *zip(*references, strict=True)))
    theirs = bleu.corpus_score(hypotheses, streams, n_bootstrap=1000)
    mean, half = theirs._mean, theirs._ci
    ((value, low, high),) = (
        vars(i).values() for i in intervals(bleu_counts(system, references), bleu4, resamples=1000)
    )
    assert value == pytest.approx(theirs.score, abs=1e-9)
    assert low == pytest.approx(mean - half, abs=1) and high == pytest.approx(mean + half, abs=1)
    assert high - low > 8  # so that agreeing to 1 says something


def test_the_p_value_is_the_fraction_of_all_exchanges_that_differ_as_much():
    references, system, better = corpus(images=9, seed=5)
    first, second = bleu_counts(system, references), bleu_counts(better, references)
    observed = bleu4(second.sum(axis=0)) - bleu4(first.sum(axis=0))
    as_large = 0
    for exchanged in itertools.product([False, True], repeat=9):
        swap = np.array(exchanged)[:, None]
        one, other = np.where(swap, second, first).sum(axis=0), np.where(swap, first, second).sum(axis=0)
        as_large += abs(bleu4(other) - bleu4(one)) >= abs(observed) - 1e-9
    exact = as_large / 2**9
    assert 0.02 < exact < 0.98
    (difference,) = differences(first, second, bleu4, resamples=20_000)
    assert difference.p_value == pytest.approx(exact, abs=0.012)


def test_the_bootstrap_interval_of_a_mean_is_the_textbooks():
    values = np.random.default_rng(1).normal(50, 12, size=400)
    counts = np.stack([values / 100, np.ones(400)], axis=1)
    ((value, low, high),) = (vars(i).values() for i in intervals(counts, percentage, resamples=8000))
    error = values.std() / np.sqrt(400)
    assert value == pytest.approx(values.mean())
    assert (low, high) == pytest.approx((value - 1.96 * error, value + 1.96 * error), abs=0.15 * error)


def test_a_resample_has_as_many_images_and_the_same_ones_for_all_systems():
    counts = np.random.default_rng(2).integers(0, 9, size=(3, 7, 4))
    counts[..., -1] = 1
    drawn = bootstrap(counts, lambda summed: summed, resamples=11)
    assert drawn.shape == (11, 3, 4)
    assert (drawn[..., -1] == 7).all()
    for system in range(3):
        np.testing.assert_array_equal(drawn[:, system], bootstrap(counts[system], lambda summed: summed, resamples=11))


def difference_of(p_value: float, low: float = 0.5, high: float = 1.5) -> Difference:
    return Difference(Interval((low + high) / 2, low, high), p_value, corrected_p_value=p_value)


def test_holms_correction_of_a_case_computed_by_hand():
    """Ascending: 4 x 0.005, 3 x 0.01, then 2 x 0.03 = 0.06 and 1 x 0.04, which may not fall below the one before."""
    tests = holm([difference_of(0.01), difference_of(0.04), difference_of(0.03), difference_of(0.005)])
    assert [test.corrected_p_value for test in tests] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert [test.p_value for test in tests] == [0.01, 0.04, 0.03, 0.005]
    assert [test.is_clear for test in tests] == [True, False, False, True]
    assert [test.corrected_p_value for test in holm([difference_of(0.7), difference_of(0.6)])] == [1, 1]
    assert holm([difference_of(0.04)]) == [difference_of(0.04)] and holm([]) == []


@pytest.mark.parametrize(
    ("p_value", "low", "high", "clear"),
    [(0.045, -1.87, 0.09, False), (0.045, -1.87, -0.09, True), (0.2, 0.1, 1.5, False), (0.2, -1.0, 1.0, False)],
)
def test_a_difference_is_clear_only_where_interval_and_test_agree(p_value, low, high, clear):
    assert difference_of(p_value, low, high).is_clear == clear


def test_a_system_does_not_differ_from_itself_and_draws_come_from_the_seed_alone():
    references, system, better = corpus(images=13)
    first, second = bleu_counts(system, references), bleu_counts(better, references)
    for difference in differences(first, first, bleu_from_counts, resamples=50):
        assert difference == Difference(Interval(0, 0, 0), 1, corrected_p_value=1)
    one, again, other = (differences(first, second, bleu4, resamples=60, seed=seed) for seed in (4, 4, 5))
    assert one == again != other


def test_false_positives_are_as_rare_as_the_p_value_promises():
    draw, positives = np.random.default_rng(6), 0
    for trial in range(200):
        first, second = (np.stack([draw.integers(0, 2, 50), np.ones(50, int)], axis=1) for _ in range(2))
        positives += differences(first, second, percentage, resamples=199, seed=trial)[0].p_value <= 0.05
    assert 1 <= positives <= 20
