"""How far to trust a caption: the confidence of its words, and whether the image is like those of the training data.

A word is *supported* if it occurs in at least one of the image's references. The confidence of a word is the estimated
probability that it is supported, that of a caption the expected fraction of its words that are. Both are fitted to
validation images.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioning.errors import InputError, one_line

Float64 = NDArray[np.float64]

_BINS = 25
"""Quantile bins of log-probabilities that the confidence is fitted to."""

_TAIL = 0.5
"""Percent of the validation images beyond each of the two limits, so that about 1 % of them are beyond one."""

_STATISTICS = ("red", "green", "blue", "red_std", "green_std", "blue_std", "saturation", "saturation_std", "texture")


@dataclass(frozen=True)
class ViewDistribution:
    """What the views of validation images look like, by their ``view_statistics``.

    Attributes:
        mean: (F,), mean of the statistics.
        precision: (F, F), inverse of their covariance.
        limit: The squared Mahalanobis distance that 0.5 % of the validation images exceed, each from the others.

    Raises:
        InputError: The numbers do not fit together.
    """

    mean: list[float]
    precision: list[list[float]]
    limit: float

    def __post_init__(self) -> None:
        F = len(_STATISTICS)
        mean, precision = np.asarray(self.mean, float), np.asarray(self.precision, float)
        finite = np.isfinite(np.concatenate([mean.ravel(), precision.ravel(), np.asarray([self.limit], float)])).all()
        if not (mean.shape == (F,) and precision.shape == (F, F) and finite):
            raise InputError("calibration: its numbers do not fit together; calibrate again")

    def distance(self, statistics: Float64) -> float:
        """Return the squared Mahalanobis distance of ``view_statistics`` from those of the validation images."""
        difference = statistics - np.asarray(self.mean)
        return float(difference @ np.asarray(self.precision) @ difference)


@dataclass(frozen=True)
class Calibration:
    """What a model's captions of validation images tell of its captions of other images.

    Attributes:
        data: What the training images are, such as "the generated shapes".
        log_probs: Log-probabilities of words in nats, ascending.
        supported: The probability that a word is supported, at each of ``log_probs``; linear between them.
        least_log_prob: The mean log-probability of a caption's words, in nats, that 0.5 % of the validation images are
            below.
        views: What the validation images look like; None if their files were not there.

    Raises:
        InputError: The numbers do not fit together.
    """

    data: str
    log_probs: list[float]
    supported: list[float]
    least_log_prob: float
    views: ViewDistribution | None

    def __post_init__(self) -> None:
        knots, supported = np.asarray(self.log_probs, float), np.asarray(self.supported, float)
        numbers = np.concatenate([knots, supported, np.asarray([self.least_log_prob], float)])
        fits = knots.ndim == 1 and len(knots) == len(supported) > 0 and isinstance(self.data, str)
        if not (fits and np.isfinite(numbers).all() and (np.diff(knots) > 0).all()):
            raise InputError("calibration: its numbers do not fit together; calibrate again")
        if supported.min() < 0 or supported.max() > 1:
            raise InputError("calibration: a probability is outside 0 .. 1; calibrate again")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Calibration:
        """Rebuild what ``to_dict`` described.

        Raises:
            InputError: It is damaged.
        """
        try:
            views = values["views"]
            return cls(**values | {"views": None if views is None else ViewDistribution(**views)})
        except InputError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"calibration: is damaged ({one_line(error)}); calibrate again") from error

    def confidences(self, log_probs: Sequence[float]) -> list[float]:
        """Return the probability that a word is supported for each word's log-probability in nats."""
        return [float(value) for value in np.interp(log_probs, self.log_probs, self.supported)]

    def is_unlike(self, statistics: Float64, mean_log_prob: float | None) -> bool:
        """Return whether an image is outside what about 99 % of the validation images are.

        An image is outside if its caption is too improbable or its view too far from the others. 0.5 % of the
        validation images are beyond each of the two limits, so that 0.5 to 1 % of them are beyond one.

        Args:
            statistics: ``view_statistics`` of the pixels that the model sees.
            mean_log_prob: Mean log-probability of its caption's words in nats; None if its words were not the most
                probable ones.
        """
        improbable = mean_log_prob is not None and mean_log_prob < self.least_log_prob
        return improbable or (self.views is not None and self.views.distance(statistics) > self.views.limit)


def view_statistics(view: Image.Image) -> Float64:
    """Return means and standard deviations of colours and saturation, and the log of the mean difference of neighbours.

    Returns:
        (9,), of RGB values in 0 .. 1; saturation is the largest minus the smallest of the three.
    """
    channels = np.moveaxis(np.asarray(view.convert("RGB"), dtype=np.float32) / 255, 2, 0).copy()  # (3, height, width)
    saturation = channels.max(axis=0) - channels.min(axis=0)
    texture = sum(np.abs(np.diff(channels, axis=axis)).mean() if channels.shape[axis] > 1 else 0.0 for axis in (1, 2))
    spread = [saturation.mean(), saturation.std(), np.log(texture + 1e-3)]
    return np.concatenate([channels.mean(axis=(1, 2)), channels.std(axis=(1, 2)), spread]).astype(np.float64)


def fit_views(views: Sequence[Float64]) -> ViewDistribution:
    """Return what views look like whose ``view_statistics`` are given.

    Raises:
        InputError: There are too few.
    """
    n = len(views)
    if n < 2 * len(_STATISTICS):
        raise InputError(f"calibration: {n} images are too few to fit it to; it needs 40 and more to report on")
    statistics = np.asarray(views)
    mean, covariance = statistics.mean(axis=0), np.cov(statistics.T)
    covariance += np.diag(0.01 * np.diag(covariance) + 1e-6)  # data sets have constant statistics, such as a background
    precision = np.linalg.inv(covariance)
    distances = np.einsum("if,fg,ig->i", statistics - mean, precision, statistics - mean)
    # Of each image from the others (Sherman-Morrison): few images are nearer to a mean that they are part of.
    distances *= n**2 * (n - 2) / (n - 1) ** 3 / (1 - n / (n - 1) ** 2 * distances)
    return ViewDistribution(mean.tolist(), precision.tolist(), float(np.percentile(distances, 100 - _TAIL)))


def fit(
    data: str,
    views: ViewDistribution | None,
    log_probs: Sequence[Sequence[float]],
    supported: Sequence[Sequence[bool]],
) -> Calibration:
    """Return the calibration of a model from its captions of validation images.

    Args:
        data: What the images are.
        views: What they look like.
        log_probs: Log-probabilities of the words of every caption, in nats.
        supported: Whether each word is supported, of every caption.

    Raises:
        InputError: There are too few words, or their log-probabilities are not finite.
    """
    if (words := sum(map(len, log_probs))) < _BINS:
        raise InputError(f"calibration: {words} words of captions are too few to fit it to; it needs {_BINS}")
    knots, probabilities = isotonic(np.concatenate(list(map(np.asarray, log_probs))), np.concatenate(supported))
    return Calibration(
        data=data,
        log_probs=knots.tolist(),
        supported=probabilities.tolist(),
        least_log_prob=float(np.percentile([np.mean(values) for values in log_probs if len(values)], _TAIL)),
        views=views,
    )


def isotonic(values: Float64, outcomes: NDArray[Any]) -> tuple[Float64, Float64]:
    """Return a non-decreasing map from values to probabilities of an outcome, as knots and their probabilities.

    Values are put into bins of equal counts; the bins' frequencies, with half an outcome of each kind added (Krichevsky
    and Trofimov), are made monotone by pooling adjacent violators.
    """
    order = np.argsort(values, kind="stable")
    pools: list[list[float]] = []  # count, outcomes, sum of values
    for rows in np.array_split(order, _BINS):
        pools.append([len(rows) + 1.0, outcomes[rows].sum() + 0.5, values[rows].mean() * (len(rows) + 1.0)])
        while len(pools) > 1 and pools[-2][1] / pools[-2][0] >= pools[-1][1] / pools[-1][0]:
            last = pools.pop()
            pools[-1] = [a + b for a, b in zip(pools[-1], last, strict=True)]
    counts, positives, sums = np.array(pools).T
    knots = sums / counts
    distinct = np.r_[True, np.diff(knots) > 0]  # bins of equal values
    return knots[distinct], (positives / counts)[distinct]


def is_supported(words: Sequence[str], references: Collection[Sequence[str]]) -> list[bool]:
    """Return for every word whether it occurs in one of the references, lists of words."""
    known = {word for reference in references for word in reference}
    return [word in known for word in words]


def reliability(predicted: Float64, observed: Float64, bins: int = 10) -> tuple[float, list[dict[str, float]]]:
    """Return the expected calibration error, and the curve that it sums.

    Args:
        predicted: (N,) probabilities.
        observed: (N,) outcomes, 0 or 1, or fractions.
        bins: Number of bins of equal width in 0 .. 1; empty ones are left out.

    Returns:
        The mean over N of the bins' |predicted - observed|, and mean predicted, mean observed and count of each bin.
    """
    place = np.minimum((predicted * bins).astype(int), bins - 1)
    curve = [
        {
            "predicted": round(float(predicted[place == b].mean()), 4),
            "observed": round(float(observed[place == b].mean()), 4),
            "count": int((place == b).sum()),
        }
        for b in np.unique(place)
    ]
    error = sum(abs(item["predicted"] - item["observed"]) * item["count"] for item in curve) / max(len(predicted), 1)
    return float(error), curve
