"""Intervals of a metric and tests of two systems, by resampling images.

The metric may be any function of counts that are summed over images: corpus BLEU, or an accuracy, whose counts are hits
and trials. These intervals and tests know nothing of the variation between training seeds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from captioning.metrics.arrays import Floats

Statistic = Callable[[Floats], Floats]
"""Maps counts that are summed over images, (.., counts), to a metric (..) or to several metrics (.., metrics)."""

SIGNIFICANCE_LEVEL = 0.05
RESAMPLES = 1000  # by default


@dataclass(frozen=True)
class Interval:
    """A metric, or the difference of two, with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """The difference of two systems' metrics on the same images, with a two-sided test.

    ``differences`` takes the interval from the paired bootstrap and the p-value from the randomization test;
    ``seeds.seed_differences`` takes both from one model of the variance.
    """

    interval: Interval
    p_value: float
    corrected_p_value: float  # corrected by ``holm``; ``p_value`` for a test made alone

    @property
    def excludes_zero(self) -> bool:
        return not self.interval.low <= 0 <= self.interval.high

    @property
    def is_significant(self) -> bool:
        return self.corrected_p_value < SIGNIFICANCE_LEVEL

    @property
    def is_clear(self) -> bool:
        """Whether interval and test agree that there is a difference."""
        return self.excludes_zero and self.is_significant


def bootstrap(counts: ArrayLike, statistic: Statistic, *, resamples: int = RESAMPLES, seed: int = 0) -> Floats:
    """Resample the images ``resamples`` times with replacement, and return the metrics of each resample.

    The number of images and the seed determine the resamples, so the metrics of two systems are paired (Koehn 2004).
    Counts (.., images, counts) give metrics (resamples, .., metrics).
    """
    counts = np.asarray(counts, dtype=np.float64)
    image_count = counts.shape[-2]
    random = np.random.default_rng(seed)
    probabilities = np.full(image_count, 1 / image_count)
    # The multinomial says how often each image is in the resample.
    return statistic(np.stack([random.multinomial(image_count, probabilities) @ counts for _ in range(resamples)]))


def intervals(counts: ArrayLike, statistic: Statistic, *, resamples: int = RESAMPLES, seed: int = 0) -> list[Interval]:
    """Return each metric of counts (images, counts) with the middle 95 % of its bootstrap."""
    metrics = statistic(np.asarray(counts, dtype=np.float64).sum(axis=-2))
    columns = np.stack([metrics, *_interval_ends(bootstrap(counts, statistic, resamples=resamples, seed=seed))])
    return [Interval(*column) for column in columns.reshape(3, -1).T.tolist()]


def differences(
    first: ArrayLike, second: ArrayLike, statistic: Statistic, *, resamples: int = RESAMPLES, seed: int = 0
) -> list[Difference]:
    """Return ``second``'s metric minus ``first``'s, for each metric of counts (images, counts).

    The p-value is the probability of a difference at least this large if the systems' captions of an image were
    exchangeable. The randomization test exchanges them with probability a half (Riezler and Maxwell 2005). The observed
    difference counts as one exchange, so the p-value is at least 1 / (resamples + 1).
    """
    counts = np.stack([np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)])
    sums = counts.sum(axis=1)
    metrics = statistic(sums)
    difference = np.atleast_1d(metrics[1] - metrics[0])
    resampled_metrics = bootstrap(counts, statistic, resamples=resamples, seed=seed)
    low, high = _interval_ends((resampled_metrics[:, 1] - resampled_metrics[:, 0]).reshape(resamples, -1))
    random = np.random.default_rng(seed)
    gains = counts[1] - counts[0]
    first_sums = sums[0] + np.stack([random.integers(0, 2, size=len(gains)) @ gains for _ in range(resamples)])
    null_differences = (statistic(sums[0] + sums[1] - first_sums) - statistic(first_sums)).reshape(resamples, -1)
    exchanges = np.isfinite(null_differences).sum(axis=0)  # an accuracy over no nouns has no value
    as_large = (np.abs(null_differences) >= np.abs(difference) - 1e-9).sum(axis=0)  # sums in another order may differ
    p_values = (as_large + 1) / (exchanges + 1)
    columns = (values.tolist() for values in (difference, low, high, p_values))
    return [Difference(Interval(*numbers), p_value, p_value) for *numbers, p_value in zip(*columns, strict=True)]


def holm(tests: Sequence[Difference]) -> list[Difference]:
    """Correct the p-values of tests that are reported together for the number of tests (Holm 1979).

    If each corrected p-value is judged at a level, the probability of any false positive is at most that level.
    """
    corrected, largest = {}, 0.0
    for rank, i in enumerate(sorted(range(len(tests)), key=lambda i: tests[i].p_value)):
        largest = max(largest, min(1.0, (len(tests) - rank) * tests[i].p_value))
        corrected[i] = largest
    return [replace(test, corrected_p_value=corrected[i]) for i, test in enumerate(tests)]


def _interval_ends(resampled_metrics: Floats) -> Floats:
    # Leaves out a resample in which a metric has no value, such as an accuracy over no nouns.
    with np.errstate(all="ignore"):
        return np.asarray(np.nanquantile(resampled_metrics, [0.025, 0.975], axis=0))
