"""Whether two variants of a model differ, each trained with several seeds and tested on the same images.

The difference of two means over seeds varies with the images and with the seeds. The variances of both are estimated
and added up, as for radiologists who each read the same cases with one of two methods (Obuchowski and Rockette 1995;
readers nested in methods: Hillis 2014, Statistics in Medicine 33):

    Var(mean_2 - mean_1) = S_1^2 / m_1 + S_2^2 / m_2 + max(0, J - E_1 / m_1 - E_2 / m_2).

S_g^2 is the variance of the metric over the m_g seeds of variant g. J is the variance of the difference over images,
with the runs as they are. The runs of one variant differ from each other on single images. These differences add
E_g / m_g to J, and S_g^2 contains them already, so E_g / m_g is subtracted. The rest of J says how much the effect of
the variant varies between images, whatever the seed. J and E_g come from the jackknife, which leaves out one image at a
time and works for every metric of summed counts, corpus BLEU included.

Each source of variance has its own degrees of freedom, hence its own critical value of Student's t. The interval takes
the mean of these values, weighted by the sources' fractions of the variance (Cochran 1964, Biometrics 20). With one
number of degrees of freedom for all (Satterthwaite), up to 12 % of the tests would be false positives instead of 5 %,
because few seeds may agree by chance. An interval is no narrower than the interval over images alone.

If run s of the second variant started from run s of the first, S^2 is the variance of the pairs' differences.
docs/statistics.md has the simulated coverage. An exact permutation test cannot replace this rule: three seeds against
three can be exchanged in 20 ways, so its p-value is at least 0.1.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from captioning.metrics.arrays import Floats, ratio
from captioning.metrics.resampling import SIGNIFICANCE_LEVEL, Difference, Interval, Statistic

RULE = "jackknife over images, Cochran's critical values"
"""The rule of these intervals, as files and pages name it."""


def seed_differences(
    first: ArrayLike, second: ArrayLike, statistic: Statistic, *, paired: bool = False
) -> list[Difference]:
    """Return the mean over seeds of ``second`` minus the mean over seeds of ``first``, for each metric.

    Args:
        first, second: Counts (seeds, images, counts) of the same images. The numbers of seeds, at least 2, may differ.
        paired: Whether each run of ``second`` started from the run of ``first`` with the same index.
    """
    counts_1, counts_2 = (np.asarray(counts, dtype=np.float64) for counts in (first, second))
    test = SeedDifferences(counts_1, counts_2, statistic, paired=paired)
    columns = (x.tolist() for x in (test.differences, test.half_width(SIGNIFICANCE_LEVEL), test.p_values()))
    return [
        Difference(Interval(value, value - width, value + width), p_value, p_value)
        for value, width, p_value in zip(*columns, strict=True)
    ]


class SeedDifferences:
    """The differences of ``seed_differences`` and their variances.

    Attributes:
        differences: (metrics,).
        image_variances: (metrics,) J, the variances of the differences over images alone.
    """

    def __init__(self, first: Floats, second: Floats, statistic: Statistic, *, paired: bool) -> None:
        if min(len(first), len(second)) < 2:
            raise ValueError(f"each variant needs two seeds or more, got {len(first)} and {len(second)}")
        (metrics_1, changes_1), (metrics_2, changes_2) = (_jackknife(counts, statistic) for counts in (first, second))
        image_changes = changes_2.mean(axis=0) - changes_1.mean(axis=0)  # (images, metrics)
        self.differences = metrics_2.mean(axis=0) - metrics_1.mean(axis=0)
        self.image_variances = np.square(image_changes).sum(axis=0)  # J
        groups = [(metrics_1, changes_1), (metrics_2, changes_2)]
        if paired:
            groups = [(metrics_2 - metrics_1, changes_2 - changes_1)]
        seed_variances = [values.var(axis=0, ddof=1) / len(values) for values, _ in groups]  # S_g^2 / m_g
        run_variance = sum(changes.var(axis=0, ddof=1).sum(axis=0) / len(changes) for _, changes in groups)  # E_g / m_g
        degrees_of_freedom = [*(len(values) - 1 for values, _ in groups), max(1, len(image_changes) - 1)]
        # The seeds of each variant or of the pairs first, the images last: (sources, metrics) and (sources, 1).
        self._variances = np.stack([*seed_variances, np.maximum(0, self.image_variances - run_variance)])
        self._degrees_of_freedom = np.array(degrees_of_freedom, dtype=np.float64)[:, None]

    def half_width(self, level: float | Floats) -> Floats:
        """Return half-widths (metrics,) of intervals that miss the truth with probability ``level``."""
        critical = -stdtrit(self._degrees_of_freedom, np.asarray(level) / 2)  # (sources, metrics), or (sources, 1)
        deviation = np.sqrt(self._variances.sum(axis=0))
        half_widths = ratio((critical * self._variances).sum(axis=0), deviation)
        return np.maximum(half_widths, critical[-1] * np.sqrt(self.image_variances))

    def p_values(self) -> Floats:
        """Return the levels (metrics,) at which the intervals end at zero, by bisection of the levels' logarithms."""
        low, high = np.full(self.differences.shape, np.log(1e-12)), np.zeros(self.differences.shape)
        for _ in range(50):
            middle = (low + high) / 2
            has_zero = np.abs(self.differences) <= np.maximum(1e-9, self.half_width(np.exp(middle)))  # less is rounding
            low, high = np.where(has_zero, middle, low), np.where(has_zero, high, middle)
        return np.exp(high)


def _jackknife(counts: Floats, statistic: Statistic) -> tuple[Floats, Floats]:
    """Return the metrics (seeds, metrics) of counts (seeds, images, counts), and their changes without each image.

    The changes (seeds, images, metrics) are centered over images and scaled, so that the sums of their products over
    images are the covariances of the metrics.
    """
    seeds, images = counts.shape[:2]
    sums = counts.sum(axis=1)
    metrics = statistic(sums).reshape(seeds, -1)
    without_image = statistic(sums[:, None] - counts).reshape(seeds, images, -1)
    # The other images may lack what a metric divides by.
    without_image = np.where(np.isfinite(without_image), without_image, metrics[:, None])
    return metrics, (without_image - without_image.mean(axis=1, keepdims=True)) * np.sqrt((images - 1) / images)
