"""Whether two variants of a model differ, each trained with several seeds and tested on the same images.

The difference of two means over seeds varies with the images and with the seeds. The variances of both are estimated
and added up, as for radiologists who each read the same cases with one of two methods (Obuchowski and Rockette 1995;
readers nested in methods: Hillis 2014, Statistics in Medicine 33):

    Var(mean_2 - mean_1) = S_1^2 / m_1 + S_2^2 / m_2 + max(0, J - E_1 / m_1 - E_2 / m_2).

S_g^2 is the variance of the metric over the m_g seeds of variant g. J is the variance of the difference that comes from
the images, for these very runs. E_g is the part of it by which one run of variant g differs from the others on single
images. S_g^2 counts this part already, so it is taken off. The last term is the effect of a variant on single images,
the same with every seed. J and E_g come from the jackknife, which leaves out one image at a time, so that any metric of
summed counts has them, corpus BLEU included.

Each source of variance has its own degrees of freedom, hence its own critical value of Student's t. The difference has
the mean of these values, weighted by the sources' fractions of the variance (Cochran 1964, Biometrics 20). With one
number of degrees of freedom for all (Satterthwaite), up to 12 % of the tests are false positives, not 5 %, because few
seeds may agree by chance. An interval is no narrower than the interval over images alone.

If run s of the second variant started from run s of the first, the differences of the pairs have one S^2.
docs/statistics.md has the simulated coverage. An exact permutation test cannot replace this rule: three seeds against
three can be exchanged in 20 ways, so its p-value is at least 0.1.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from captioning.metrics.resampling import SIGNIFICANCE_LEVEL, Difference, Floats, Interval, Statistic, ratio

RULE = "jackknife over images, Cochran's critical values"
"""The rule of these intervals, as files and pages name it."""


def seed_differences(
    first: ArrayLike, second: ArrayLike, statistic: Statistic, *, paired: bool = False
) -> list[Difference]:
    """Return the mean over seeds of ``second`` minus the mean over seeds of ``first``, for each of S metrics.

    Args:
        first, second: (seeds, images, C) of the same images, two or more seeds each; their numbers may differ.
        paired: Each run of ``second`` started from the run of ``first`` with the same index.
    """
    before, after = (np.asarray(counts, dtype=np.float64) for counts in (first, second))
    change = SeedDifferences(before, after, statistic, paired=paired)
    columns = (x.tolist() for x in (change.differences, change.half_width(SIGNIFICANCE_LEVEL), change.p_values()))
    return [
        Difference(Interval(value, value - width, value + width), p_value, p_value)
        for value, width, p_value in zip(*columns, strict=True)
    ]


class SeedDifferences:
    """The differences of ``seed_differences`` and their variances.

    Attributes:
        differences: (S,).
        image_variances: (S,) variances of the differences over images alone, of these very runs.
    """

    def __init__(self, first: Floats, second: Floats, statistic: Statistic, *, paired: bool) -> None:
        if min(len(first), len(second)) < 2:
            raise ValueError(f"each variant needs two seeds or more, got {len(first)} and {len(second)}")
        (before, changes_before), (after, changes_after) = _jackknife(first, statistic), _jackknife(second, statistic)
        image_changes = changes_after.mean(axis=0) - changes_before.mean(axis=0)  # (images, S)
        self.differences = after.mean(axis=0) - before.mean(axis=0)
        self.image_variances = np.square(image_changes).sum(axis=0)
        sources = [(before, changes_before), (after, changes_after)]
        if paired:
            sources = [(after - before, changes_after - changes_before)]
        run_variance = sum(changes.var(axis=0, ddof=1).sum(axis=0) / len(changes) for _, changes in sources)
        over_seeds = [values.var(axis=0, ddof=1) / len(values) for values, _ in sources]
        degrees_of_freedom = [*(len(values) - 1 for values, _ in sources), max(1, len(image_changes) - 1)]
        # The seeds of each variant or of the pairs first, the images last: (sources, S) and (sources, 1).
        self._variances = np.stack([*over_seeds, np.maximum(0, self.image_variances - run_variance)])
        self._degrees_of_freedom = np.array(degrees_of_freedom, dtype=np.float64)[:, None]

    def half_width(self, level: float | Floats) -> Floats:
        """Return half-widths (S,) of intervals that miss the truth with probability ``level``, one number or (S,)."""
        critical = -stdtrit(self._degrees_of_freedom, np.asarray(level) / 2)  # (sources, S), or (sources, 1)
        deviation = np.sqrt(self._variances.sum(axis=0))
        weighted = ratio((critical * self._variances).sum(axis=0), deviation)
        return np.maximum(weighted, critical[-1] * np.sqrt(self.image_variances))

    def p_values(self) -> Floats:
        """Return the levels (S,) at which the intervals end at zero, by bisection of their logarithm."""
        low, high = np.full(self.differences.shape, np.log(1e-12)), np.zeros(self.differences.shape)
        for _ in range(50):
            middle = (low + high) / 2
            inside = np.abs(self.differences) <= np.maximum(1e-9, self.half_width(np.exp(middle)))  # less is rounding
            low, high = np.where(inside, middle, low), np.where(inside, high, middle)
        return np.exp(high)


def _jackknife(counts: Floats, statistic: Statistic) -> tuple[Floats, Floats]:
    """Return the metrics (seeds, S) of counts (seeds, images, C), and how much they change without each image.

    The changes (seeds, images, S) are centered over images and scaled: sums of their products over images are the
    covariances of the metrics.
    """
    runs, images = counts.shape[:2]
    total = counts.sum(axis=1)
    values = statistic(total).reshape(runs, -1)
    left_out = statistic(total[:, None] - counts).reshape(runs, images, -1)
    # The other images may lack what a metric divides by.
    left_out = np.where(np.isfinite(left_out), left_out, values[:, None])
    return values, (left_out - left_out.mean(axis=1, keepdims=True)) * np.sqrt((images - 1) / images)
