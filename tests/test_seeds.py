"""The test over seeds and images, worked by hand and against simulations of both sources of variance."""

import math

import numpy as np
import pytest
from scipy.special import stdtr, stdtrit

from benchmarks.coverage import Cell, grid, simulate
from captioning.metrics.arrays import percentage
from captioning.metrics.bleu import bleu_counts, bleu_from_counts
from captioning.metrics.seeds import SeedDifferences, seed_differences


def counts_of(values: np.ndarray) -> np.ndarray:
    """Counts whose ``percentage`` is the mean over images of values (seeds, images)."""
    return np.stack([values / 100, np.ones_like(values)], axis=-1)


@pytest.mark.parametrize(
    "cell",
    [
        # Of few seeds, the larger deviation counts, and is often estimated too small by chance.
        Cell("mean", 60, (3, 3), paired=False, ratio=10, image_fraction=0.1),
        Cell("mean", 60, (2, 5), paired=False, ratio=0.1, image_fraction=0.1),
        Cell("heavy tails", 60, (3, 3), paired=True, ratio=1, image_fraction=0.1),
        Cell("BLEU-4", 60, (2, 2), paired=True, ratio=1, image_fraction=0.1),
        # Where one source outweighs the others, intervals are hardly wider than they must be.
        Cell("mean", 200, (5, 5), paired=False, ratio=3, image_fraction=0.1),
    ],
)
def test_intervals_of_few_seeds_hold_the_true_difference(cell):
    assert 0.94 <= simulate(cell, 3000, np.random.default_rng(7))["coverage"] <= 0.975  # 0.4 % is a standard error


@pytest.mark.slow
def test_the_whole_grid_has_the_stated_coverage():
    """Three standard errors below 94 %; small groups of like deviations are above 96 % (docs/statistics.md)."""
    for number, cell in enumerate(grid()):
        assert simulate(cell, 500, np.random.default_rng([1, number]))["coverage"] > 0.94 - 3 * 0.0106, cell


def test_a_p_value_is_the_level_at_which_the_interval_ends_at_zero():
    draw = np.random.default_rng(4)
    runs = [counts_of(draw.normal(mean, 5, (3, 50)) + draw.normal(0, 1, (3, 1))) for mean in (50, 53)]
    (difference,) = seed_differences(*runs, percentage)
    half = SeedDifferences(*runs, percentage, paired=False).half_width(difference.p_value)
    assert difference.interval.value == pytest.approx(half[0], abs=1e-6)


def test_pairs_that_differ_alike_on_every_image_are_compared_by_the_paired_t_test():
    """Worked by hand: differences 2, 3, 4, so the mean is 3, SE^2 = 1/3 and 2 degrees of freedom."""
    first, second = np.array([10.0, 20, 30]), np.array([12.0, 23, 34])
    images = np.ones((1, 7))
    runs = [counts_of(values[:, None] * images) for values in (first, second)]
    (difference,) = seed_differences(*runs, percentage, paired=True)
    half = 4.302653 * math.sqrt(1 / 3)
    interval = difference.interval
    assert (interval.low, interval.value, interval.high) == pytest.approx((3 - half, 3, 3 + half))
    assert difference.p_value == pytest.approx(2 * stdtr(2, -3 * math.sqrt(3)))


def test_the_critical_value_is_the_mean_of_the_sources_weighted_by_their_variances():
    """Worked by hand (Cochran 1964): means 11 and 15, variances of the means 1/3 and 4/2."""
    first, second = np.array([10.0, 11, 12]), np.array([13.0, 17])
    images = np.ones((1, 7))
    runs = [counts_of(values[:, None] * images) for values in (first, second)]
    (difference,) = seed_differences(*runs, percentage)
    assert difference.interval.value == pytest.approx(4)
    variances = 1 / 3, 8 / 2
    critical = (4.302653 * variances[0] + 12.706205 * variances[1]) / sum(variances)
    half = critical * math.sqrt(sum(variances))
    assert (difference.interval.low, difference.interval.high) == pytest.approx((4 - half, 4 + half))


def test_an_interval_is_no_narrower_than_over_images_alone():
    """Equal metrics of two seeds do not mean that other seeds have the same metric."""
    draw = np.random.default_rng(6)
    runs = [draw.normal(50, 10, (2, 100)) for _ in range(2)]
    first, second = (counts_of(values - values.mean(axis=1, keepdims=True) + 50) for values in runs)
    (difference,) = seed_differences(first, second, percentage)
    gain = runs[1].mean(axis=0) - runs[0].mean(axis=0)
    assert difference.interval.high == pytest.approx(-stdtrit(99, 0.025) * gain.std(ddof=1) / 10)


def test_bleu_of_one_pair_of_seeds_is_the_mean_of_their_corpus_scores():
    draw = np.random.default_rng(1)
    references = [[list(draw.choice(list("abcdef"), 8)) for _ in range(2)] for _ in range(40)]

    def system(skill):
        return [[w if draw.random() < skill else "z" for w in refs[0]] for refs in references]

    runs = [np.stack([bleu_counts(system(s), references) for _ in range(3)]) for s in (0.6, 0.9)]
    tests = seed_differences(*runs, bleu_from_counts)
    scores = [[bleu_from_counts(run.sum(axis=0)) for run in group] for group in runs]
    expected = np.mean(scores[1], axis=0) - np.mean(scores[0], axis=0)
    assert [test.interval.value for test in tests] == pytest.approx(list(expected))
    assert all(test.is_clear for test in tests)


def test_images_without_what_a_score_divides_by_break_nothing():
    counts = np.zeros((4, 6, 2))
    counts[:, 2] = [[1, 2], [2, 2], [2, 3], [3, 3]]  # one image has all nouns
    (difference,) = seed_differences(counts[:2], counts[2:], percentage)
    interval = difference.interval
    assert interval.low < interval.value < interval.high and 0 < difference.p_value < 1


def test_equal_runs_do_not_differ_and_one_seed_is_refused():
    same = counts_of(np.random.default_rng(2).normal(50, 9, (1, 20)).repeat(2, axis=0))
    (difference,) = seed_differences(same, same, percentage)
    assert (difference.interval.value, difference.p_value) == (0, 1) and not difference.excludes_zero
    with pytest.raises(ValueError, match="two seeds or more, got 1 and 2"):
        seed_differences(same[:1], same, percentage)
