"""The test over seeds and images, against textbook t tests and against simulations of both sources of variance."""

from __future__ import annotations

import math

import numpy as np
import pytest

from captioning.evaluation.bleu import bleu_counts, bleu_from_counts
from captioning.evaluation.resampling import differences, percentage
from captioning.evaluation.seeds import seed_differences, t_p_value, t_quantile


def counts_of(values: np.ndarray) -> np.ndarray:
    """Counts whose ``percentage`` is the mean over images of values (seeds, images)."""
    return np.stack([values / 100, np.ones_like(values)], axis=-1)


def simulated(draw, seeds, images, *, hard: float, variant: float, seed: float, noise: float):
    """Two variants of the same quality: per-image scores of their runs, with the standard deviation of each source."""
    hardness = draw.normal(50, hard, images)
    groups = []
    for count in seeds:
        own = hardness + draw.normal(0, variant, images)
        groups.append(counts_of(own + draw.normal(0, seed, (count, 1)) + noise * draw.standard_normal((count, images))))
    return groups


@pytest.mark.parametrize(
    ("seeds", "sources"),
    [
        ((3, 3), {"hard": 0, "variant": 0, "seed": 1, "noise": 0}),
        ((3, 3), {"hard": 10, "variant": 2, "seed": 2, "noise": 3}),
        ((3, 3), {"hard": 10, "variant": 3, "seed": 0, "noise": 3}),
        ((3, 3), {"hard": 10, "variant": 1, "seed": 0.6, "noise": 5}),
        ((2, 5), {"hard": 10, "variant": 2, "seed": 0.5, "noise": 4}),
    ],
)
def test_intervals_hold_the_truth_and_p_values_are_uniform_if_variants_do_not_differ(seeds, sources):
    draw = np.random.default_rng(11)
    trials, held, p_values = 300, 0, []
    for trial in range(trials):
        first, second = simulated(draw, seeds, 60, **sources)
        (difference,) = seed_differences(first, second, percentage, resamples=150, seed=trial)
        held += not difference.excludes_zero
        p_values.append(difference.p_value)
    assert 0.91 <= held / trials <= 0.995  # 0.95 within three standard errors, and what is conservative
    for level in (0.05, 0.2, 0.5, 0.8):
        error = math.sqrt(level * (1 - level) / trials)
        assert level - 3 * error - 0.1 * (level > 0.1) < np.mean(np.array(p_values) < level) < level + 3 * error


def test_a_true_difference_is_found_and_its_interval_holds_it():
    draw = np.random.default_rng(3)
    held = detected = 0
    for trial in range(100):
        first, second = simulated(draw, (3, 3), 60, hard=10, variant=1, seed=0.5, noise=3)
        second[..., 0] += 0.04  # 4 percent
        (difference,) = seed_differences(first, second, percentage, resamples=150, seed=trial)
        held += difference.interval.low <= 4 <= difference.interval.high
        detected += difference.clear
    assert held >= 90 and detected >= 90


@pytest.mark.parametrize(
    ("pairs", "sources"),
    [
        (3, {"variant": 0, "gain": 0, "noise": 5}),
        (3, {"variant": 2, "gain": 1, "noise": 3}),
        (3, {"variant": 0, "gain": 1, "noise": 0.5}),
        (5, {"variant": 2, "gain": 0.1, "noise": 4}),
    ],
)
def test_intervals_of_pairs_hold_the_truth_whatever_the_first_runs_are_worth(pairs, sources):
    """Second stages: each has its first stage's quality, and a gain that varies; of seeds 2 points apart."""
    draw = np.random.default_rng(12)
    trials, held, widths = 300, 0, []
    for trial in range(trials):
        hardness, own = draw.normal(50, 10, 60), draw.normal(0, sources["variant"], 60)
        first = hardness + draw.normal(0, 2, (pairs, 1))
        second = first + own + draw.normal(0, sources["gain"], (pairs, 1))
        runs = [counts_of(values + draw.normal(0, sources["noise"], (pairs, 60))) for values in (first, second)]
        (difference,) = seed_differences(*runs, percentage, paired=True, resamples=150, seed=trial)
        held += not difference.excludes_zero
        (unpaired,) = seed_differences(*runs, percentage, resamples=150, seed=trial)
        widths.append([test.interval.high - test.interval.low for test in (difference, unpaired)])
        assert difference.interval.value == pytest.approx(unpaired.interval.value)
    assert 0.90 <= held / trials <= 0.995
    paired, apart = np.median(widths, axis=0)
    assert paired < 0.8 * apart


def test_pairs_that_differ_alike_on_every_image_are_compared_by_the_paired_t_test():
    """Worked by hand: differences 2, 3, 4, so the mean is 3, SE^2 = 1/3 and 2 degrees of freedom."""
    first, second = np.array([10.0, 20, 30]), np.array([12.0, 23, 34])
    images = np.ones((1, 7))
    runs = [counts_of(values[:, None] * images) for values in (first, second)]
    (difference,) = seed_differences(*runs, percentage, paired=True)
    half = 4.302653 * math.sqrt(1 / 3)
    interval = difference.interval
    assert (interval.low, interval.value, interval.high) == pytest.approx((3 - half, 3, 3 + half))
    assert difference.p_value == pytest.approx(t_p_value(3 * math.sqrt(3), 2))
    for some, others in ((runs[0][:2], runs[1][:2]), (runs[0], runs[1][:2])):
        with pytest.raises(ValueError, match="3 pairs or more"):
            seed_differences(some, others, percentage, paired=True)


def test_seeds_that_change_every_image_alike_are_compared_by_welchs_t_test():
    """Worked by hand: means 11 and 14, variances 1 and 4, so SE^2 = 5/3 and 50/17 degrees of freedom."""
    first, second = np.array([10.0, 11, 12]), np.array([12.0, 14, 16])
    images = np.ones((1, 7))
    runs = [counts_of(values[:, None] * images) for values in (first, second)]
    (difference,) = seed_differences(*runs, percentage)
    assert difference.interval.value == pytest.approx(3)
    half = t_quantile(0.95, 50 / 17) * math.sqrt(5 / 3)
    assert (difference.interval.low, difference.interval.high) == pytest.approx((3 - half, 3 + half))
    assert difference.p_value == pytest.approx(t_p_value(3 / math.sqrt(5 / 3), 50 / 17))


def test_runs_that_differ_by_variant_alone_are_compared_over_images():
    """All seeds of a variant say the same, so only images vary: the paired t test's normal approximation."""
    draw = np.random.default_rng(5)
    hardness, gain = draw.normal(50, 10, 400), draw.normal(0.3, 2, 400)
    first, second = (np.repeat(values[None], 3, axis=0) for values in (hardness, hardness + gain))
    (difference,) = seed_differences(counts_of(first), counts_of(second), percentage, resamples=4000)
    half = 1.96 * gain.std() / math.sqrt(400)
    assert difference.interval.value == pytest.approx(gain.mean())
    assert difference.interval.high - difference.interval.value == pytest.approx(half, rel=0.06)


def test_bleu_of_one_pair_of_seeds_is_the_mean_of_their_corpus_scores():
    draw = np.random.default_rng(1)
    references = [[list(draw.choice(list("abcdef"), 8)) for _ in range(2)] for _ in range(40)]

    def system(skill):
        return [[w if draw.random() < skill else "z" for w in refs[0]] for refs in references]

    runs = [np.stack([bleu_counts(system(s), references) for _ in range(3)]) for s in (0.6, 0.9)]
    tests = seed_differences(*runs, bleu_from_counts, resamples=200)
    scores = [[bleu_from_counts(run.sum(axis=0)) for run in group] for group in runs]
    expected = np.mean(scores[1], axis=0) - np.mean(scores[0], axis=0)
    assert [test.interval.value for test in tests] == pytest.approx(list(expected))
    assert all(test.clear for test in tests)
    over_images = differences(runs[0][0], runs[1][0], bleu_from_counts, resamples=200)
    assert all(test.corrected == test.p_value for test in tests) and len(tests) == len(over_images) == 4


def test_a_resample_without_what_a_score_divides_by_breaks_nothing():
    counts = np.zeros((4, 6, 2))
    counts[:, 2] = [[1, 2], [2, 2], [2, 3], [3, 3]]  # one image has all nouns: a third of the resamples have none
    for resamples in (1, 50):
        (difference,) = seed_differences(counts[:2], counts[2:], percentage, resamples=resamples)
        interval = difference.interval
        assert interval.low < interval.value < interval.high and 0 < difference.p_value < 1


def test_equal_runs_do_not_differ_and_one_seed_is_refused():
    same = counts_of(np.random.default_rng(2).normal(50, 9, (1, 20)).repeat(2, axis=0))
    (difference,) = seed_differences(same, same, percentage, resamples=50)
    assert (difference.interval.value, difference.p_value) == (0, 1) and not difference.excludes_zero
    with pytest.raises(ValueError, match=r"\(1, 20, 2\)"):
        seed_differences(same[:1], same, percentage)
    with pytest.raises(ValueError, match=r"\(2, 19, 2\)"):
        seed_differences(same, same[:, :19], percentage)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (4, 2.776), (7, 2.365), (30, 2.042), (1e5, 1.960)],
)
def test_students_t_is_that_of_the_tables(freedom, quantile):
    assert t_quantile(0.95, freedom) == pytest.approx(quantile, abs=6e-4)
    assert t_p_value(quantile, freedom) == pytest.approx(0.05, abs=1e-4)
    assert t_p_value(0, freedom) == 1 and t_p_value(80, freedom) < 0.01
