"""The calibration that a run writes into its checkpoints, from what its validation has computed anyway."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from captioning.checkpoint.calibration import (
    Calibration,
    ViewDistribution,
    fit,
    fit_views,
    is_supported,
    view_statistics,
)
from captioning.errors import InputError
from captioning.evaluation.records import CaptionedImage
from captioning.training.datamodule import CaptionDataModule

_IMAGES = 300
"""Largest number of validation images that are read again for their pixels."""


def calibrate(
    data: str, views: ViewDistribution | None, images: Sequence[CaptionedImage], log_probs: Sequence[Sequence[float]]
) -> Calibration | None:
    """Return the calibration of a model from a validation.

    Args:
        data: What the images are.
        views: What they look like.
        images: The validation images with their captions.
        log_probs: Log-probabilities of the words of every caption, in nats.

    Returns:
        None if the captions have too few words, or the model has diverged.
    """
    try:
        return fit(data, views, log_probs, [is_supported(image.words, image.reference_words) for image in images])
    except InputError:
        return None


def validation_views(data: CaptionDataModule) -> ViewDistribution | None:
    """Return what the images of the evaluated split look like, from some that are spread evenly over the split.

    Returns:
        None if there are too few image files, which training from cached features does not need, or a damaged one.
    """
    rows = np.unique(np.linspace(0, len(data.evaluated) - 1, _IMAGES).astype(int)).tolist()
    try:
        photos = (data.photo(row) for row in rows)
        return fit_views([view_statistics(data.encoder.preprocessing.view(photo)) for photo in photos if photo])
    except InputError:
        return None
