"""How certain a score is, and whether two systems differ: resampling over images. Counts in, numbers out.

It works for any score that is a function of counts summed over images: corpus BLEU, and accuracies, whose counts are
hits and trials. The images are resampled; the variation between training seeds is not in these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]

LEVEL = 0.05  # of significance

_BLOCK = 2_000_000  # random numbers drawn at a time, 16 MB


@dataclass(frozen=True)
class Interval:
    """A score of all images, and the middle ``confidence`` of what resampled images give."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """How much higher a system scores than another on the same images.

    Attributes:
        interval: of the difference, from the paired bootstrap.
        p_value: two-sided, from the randomization test: the probability of a difference at least this large if both
            systems' captions of an image were exchangeable.
        corrected: the p-value after ``holm``; a test made alone needs no correction.
    """

    interval: Interval
    p_value: float
    corrected: float

    @property
    def excludes_zero(self) -> bool:
        return not self.interval.low <= 0 <= self.interval.high

    @property
    def significant(self) -> bool:
        return self.corrected < LEVEL

    @property
    def clear(self) -> bool:
        """Whether interval and test agree that there is a difference."""
        return self.excludes_zero and self.significant


def bootstrap(counts: ArrayLike, score: Statistic, *, resamples: int = 1000, seed: int = 0) -> Floats:
    """Return the scores of ``resamples`` sets of as many images, drawn from the images with replacement.

    The same images are drawn for every system, and for every call with as many images and the same seed: scores of
    two systems are pairs (Koehn 2004).

    Args:
        counts: (systems, images, C), or (images, C) of one system.
        score: turns counts summed over images (..., C) into scores (...) or (..., S).
        resamples: how many sets.
        seed: of the draws.

    Returns:
        (resamples, systems) or (resamples, systems, S); without the axis of systems for counts of one.

    Raises:
        ValueError: no image or no sample.
    """
    counts = _counts(counts, resamples, dimensions=(2, 3))
    images = counts.shape[-2]
    random = np.random.default_rng(seed)
    scores = []
    for block in _blocks(resamples, images):
        times = random.multinomial(images, np.full(images, 1 / images), size=block).astype(np.float64)
        scores.append(score(np.moveaxis(times @ counts, -2, 0)))  # how often each image was drawn: a product, no loop
    return np.concatenate(scores)


def randomization(
    first: ArrayLike, second: ArrayLike, score: Statistic, *, resamples: int = 1000, seed: int = 0
) -> Floats:
    """Return score(second) - score(first) for ``resamples`` random exchanges of the two systems, image by image.

    Each image's pair is exchanged with probability a half (Riezler and Maxwell 2005): the distribution of differences
    between systems that do not differ.

    Args:
        first, second: (images, C) of the same images.
        score, resamples, seed: as of ``bootstrap``.

    Returns:
        (resamples,) or (resamples, S).

    Raises:
        ValueError: no image, no sample, or counts of different shape.
    """
    before, after = _counts(first, resamples, dimensions=(2,)), _counts(second, resamples, dimensions=(2,))
    if before.shape != after.shape:
        raise ValueError(f"both systems need counts of the same images, got {before.shape} and {after.shape}")
    random = np.random.default_rng(seed)
    gain, total = after - before, before.sum(axis=0) + after.sum(axis=0)
    differences = []
    for block in _blocks(resamples, len(before)):
        exchanged = random.integers(0, 2, size=(block, len(before))).astype(np.float64)
        new_first = before.sum(axis=0) + exchanged @ gain
        differences.append(score(total - new_first) - score(new_first))
    return np.concatenate(differences)


def intervals(
    counts: ArrayLike, score: Statistic, *, resamples: int = 1000, seed: int = 0, confidence: float = 0.95
) -> Floats:
    """Return (3, ...): the scores of all images, and the lower and upper percentile of their bootstrap.

    The rest is of ``score``'s shape: (S,), or (systems, S) for counts of several systems.
    """
    return _summary(score(_summed(counts)), bootstrap(counts, score, resamples=resamples, seed=seed), confidence)


def differences(
    first: ArrayLike,
    second: ArrayLike,
    score: Statistic,
    *,
    resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> list[Difference]:
    """Return how much higher ``second`` scores than ``first``, for each of the S scores that ``score`` gives.

    The p-value counts the observed difference as one of the exchanges, so it is at least 1 / (resamples + 1).
    Exchanges that have no score are left out.

    Args:
        first, second: (images, C) of the same images.
        score, resamples, seed: as of ``bootstrap``.
        confidence: Fraction of resampled differences inside the interval.
    """
    counts = np.stack([np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)])
    both = score(_summed(counts))
    observed = np.atleast_1d(both[1] - both[0])
    drawn = bootstrap(counts, score, resamples=resamples, seed=seed)
    _, low, high = _summary(observed, (drawn[:, 1] - drawn[:, 0]).reshape(resamples, -1), confidence)
    chance = randomization(first, second, score, resamples=resamples, seed=seed).reshape(resamples, -1)
    exchanges = np.isfinite(chance).sum(axis=0)  # in the others one of the two has nothing to be scored
    as_large = (np.abs(chance) >= np.abs(observed) - 1e-9).sum(axis=0)  # the same sums in another order may differ
    return [
        Difference(Interval(float(value), float(lower), float(upper)), float(p_value), corrected=float(p_value))
        for value, lower, upper, p_value in zip(observed, low, high, (as_large + 1) / (exchanges + 1), strict=True)
    ]


def holm(tests: Sequence[Difference]) -> list[Difference]:
    """Return tests that are reported together, with their p-values corrected for their number (Holm 1979).

    The probability of any false positive among them is at most the level at which each corrected p-value is judged.
    """
    corrected, largest = {}, 0.0
    for rank, i in enumerate(sorted(range(len(tests)), key=lambda i: tests[i].p_value)):
        largest = max(largest, min(1.0, (len(tests) - rank) * tests[i].p_value))
        corrected[i] = largest
    return [replace(test, corrected=corrected[i]) for i, test in enumerate(tests)]


def percentage(counts: Floats) -> Floats:
    """Return percent (...) of counts (..., 2), hits and trials; nan for no trial."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(100 * counts[..., 0] / counts[..., 1])


def _counts(counts: ArrayLike, resamples: int, *, dimensions: tuple[int, ...]) -> Floats:
    counts = np.asarray(counts, dtype=np.float64)
    if counts.ndim not in dimensions or not counts.shape[-2]:
        raise ValueError(f"counts must be (images, C) with at least one image, got {counts.shape}")
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    return counts


def _summed(counts: ArrayLike) -> Floats:
    return np.asarray(counts, dtype=np.float64).sum(axis=-2)


def _blocks(resamples: int, images: int) -> Iterator[int]:
    size = max(1, _BLOCK // images)
    for start in range(0, resamples, size):
        yield min(size, resamples - start)


def _summary(value: Floats, drawn: Floats, confidence: float) -> Floats:
    tail = (1 - confidence) / 2
    # A resample may lack what a score divides by (no noun that names an object); it says nothing of the score.
    with np.errstate(all="ignore"):
        low, high = np.nanquantile(drawn, [tail, 1 - tail], axis=0)
    return np.stack([np.asarray(value, dtype=np.float64), low, high])
