"""Intervals of a metric and tests of two systems, by resampling images.

The metric may be any function of counts summed over images, such as corpus BLEU, or an accuracy, whose counts are hits
and trials. The variation between training seeds is not in these numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""Turns counts summed over images (.., C) into a metric (..) or S metrics (.., S)."""

SIGNIFICANCE_LEVEL = 0.05
RESAMPLES = 1000  # by default


@dataclass(frozen=True)
class Interval:
    """A metric of all images, and the middle 95 % of the metrics of resampled images."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """The difference of two systems' metrics on the same images.

    The interval is from the paired bootstrap. The two-sided p-value is from the randomization test: the probability of
    a difference at least this large if both systems' captions of an image were exchangeable.
    """

    interval: Interval
    p_value: float
    corrected_p_value: float  # corrected by ``holm``; ``p_value`` for a test made alone

    @property
    def excludes_zero(self) -> bool:
        return not self.interval.low <= 0 <= self.interval.high

    @property
    def significant(self) -> bool:
        return self.corrected_p_value < SIGNIFICANCE_LEVEL

    @property
    def clear(self) -> bool:
        """Whether interval and test agree that there is a difference."""
        return self.excludes_zero and self.significant


def bootstrap(counts: ArrayLike, statistic: Statistic, *, resamples: int = RESAMPLES, seed: int = 0) -> Floats:
    """Draw the images ``resamples`` times with replacement, and return the metrics of each draw.

    The number of images and the seed determine the draws, so metrics of two systems are pairs (Koehn 2004). Counts
    (systems, images, C) or (images, C) give metrics (resamples, systems, S) or (resamples, S).
    """
    counts = np.asarray(counts, dtype=np.float64)
    images = counts.shape[-2]
    random, even = np.random.default_rng(seed), np.full(images, 1 / images)
    # Multiplying counts by the draws of each image takes no loop over images.
    return statistic(np.stack([random.multinomial(images, even) @ counts for _ in range(resamples)]))


def intervals(counts: ArrayLike, statistic: Statistic, *, resamples: int = RESAMPLES, seed: int = 0) -> list[Interval]:
    """Return each of S metrics of counts (images, C) with the middle 95 % of its bootstrap."""
    value = statistic(np.asarray(counts, dtype=np.float64).sum(axis=-2))
    columns = np.stack([value, *_middle(bootstrap(counts, statistic, resamples=resamples, seed=seed))])
    return [Interval(*column) for column in columns.reshape(3, -1).T.tolist()]


def differences(
    first: ArrayLike, second: ArrayLike, statistic: Statistic, *, resamples: int = RESAMPLES, seed: int = 0
) -> list[Difference]:
    """Return ``second``'s metric minus ``first``'s, for each of S metrics of counts (images, C).

    The randomization test exchanges the systems' captions of each image with probability a half (Riezler and Maxwell
    2005). The observed difference counts as one exchange, so the p-value is at least 1 / (resamples + 1). Exchanges
    for which the metric has no value are left out.
    """
    counts = np.stack([np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)])
    total = counts.sum(axis=1)
    both = statistic(total)
    observed = np.atleast_1d(both[1] - both[0])
    resampled = bootstrap(counts, statistic, resamples=resamples, seed=seed)
    low, high = _middle((resampled[:, 1] - resampled[:, 0]).reshape(resamples, -1))
    random = np.random.default_rng(seed)
    gains = counts[1] - counts[0]
    exchanged = total[0] + np.stack([random.integers(0, 2, size=len(gains)) @ gains for _ in range(resamples)])
    null_differences = (statistic(total[0] + total[1] - exchanged) - statistic(exchanged)).reshape(resamples, -1)
    exchanges = np.isfinite(null_differences).sum(axis=0)  # a metric may have no value, such as an accuracy of no noun
    as_large = (np.abs(null_differences) >= np.abs(observed) - 1e-9).sum(axis=0)  # another order rounds differently
    p_values = (as_large + 1) / (exchanges + 1)
    columns = (values.tolist() for values in (observed, low, high, p_values))
    return [Difference(Interval(*ends), p_value, p_value) for *ends, p_value in zip(*columns, strict=True)]


def holm(tests: Sequence[Difference]) -> list[Difference]:
    """Return tests that are reported together, with their p-values corrected for their number (Holm 1979).

    The probability of any false positive among them is at most the level at which each corrected p-value is judged.
    """
    corrected, largest = {}, 0.0
    for rank, i in enumerate(sorted(range(len(tests)), key=lambda i: tests[i].p_value)):
        largest = max(largest, min(1.0, (len(tests) - rank) * tests[i].p_value))
        corrected[i] = largest
    return [replace(test, corrected_p_value=corrected[i]) for i, test in enumerate(tests)]


def percentage(counts: Floats) -> Floats:
    """Return percent (.., 1) of counts (.., 2), hits and trials; nan for no trial."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return 100 * counts[..., :1] / counts[..., 1:]


def ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Return the quotient, and 0 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(denominator), where=denominator > 0)


def _middle(resampled: Floats) -> Floats:
    # A resample in which a metric has no value, such as an accuracy of no noun, is left out.
    with np.errstate(all="ignore"):
        return np.asarray(np.nanquantile(resampled, [0.025, 0.975], axis=0))
