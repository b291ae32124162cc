"""`captioning export --calibrate`: the confidence of captions, fitted to the validation images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from captioning.checkpoint.calibration import (
    Calibration,
    Float64,
    fit,
    fit_views,
    is_supported,
    reliability,
    view_statistics,
)
from captioning.component import known_class
from captioning.data.records import CaptionSource
from captioning.errors import InputError, one_line

if TYPE_CHECKING:
    from captioning.inference import ImageCaptioner


def calibrate(captioner: ImageCaptioner) -> tuple[Calibration, dict[str, Any]]:
    """Return a model's calibration, and how well it holds on images that it was not fitted to.

    The model captions the validation images of its data settings with its own search. The calibration is fitted to all
    of them. The report is cross-fitted: every image is judged by a calibration that was fitted to the other half, which
    has every second image. It has the expected calibration error of words and of captions with their reliability
    curves, and the fraction of images that the model would warn of.

    Raises:
        InputError: The model's settings name no data, these have no validation images or too few, or a file is missing.
    """
    source = _source(captioner.settings)
    source.tokenizer = captioner.vocabulary.tokenizer
    source.prepare()
    index = source.index("val")
    index.check_images()
    captioner.calibration = None
    captioned = [
        _Captioned(
            view_statistics(caption.view),
            caption.log_probs[: len(caption.words)],
            is_supported(caption.words, [text.split() for text in index.references(row)]),
        )
        for row, caption in enumerate(captioner.stream([index.image_path(row) for row in range(len(index))]))
    ]
    halves = captioned[::2], captioned[1::2]
    judged = zip((_fitted(source.description, half) for half in reversed(halves)), halves, strict=True)
    return _fitted(source.description, captioned), _report(list(judged)) | {
        "search": vars(captioner.options),
        "data": source.description,
        "split": "val",
    }


class _Captioned(NamedTuple):
    """A captioned image: the statistics of its view, its words' log-probabilities, and which are supported."""

    statistics: Float64
    log_probs: list[float]
    supported: list[bool]


def _fitted(data: str, images: Sequence[_Captioned]) -> Calibration:
    """Return the calibration that is fitted to captioned images of the data."""
    views = fit_views([image.statistics for image in images])
    return fit(data, views, [image.log_probs for image in images], [image.supported for image in images])


def _report(judged: Sequence[tuple[Calibration, Sequence[_Captioned]]]) -> dict[str, Any]:
    """Return the report on captioned images, each judged by the calibration beside it."""
    pairs = [(calibration, image) for calibration, images in judged for image in images if len(image.log_probs)]
    confidences = [np.array(calibration.confidences(image.log_probs)) for calibration, image in pairs]
    outcomes = [np.array(image.supported, float) for _, image in pairs]
    word_error, words = reliability(np.concatenate(confidences), np.concatenate(outcomes))
    of_captions = np.array([values.mean() for values in confidences]), np.array([values.mean() for values in outcomes])
    varied = all(values.std() > 0 for values in of_captions)  # otherwise there is no correlation
    caption_error, curve = reliability(*of_captions)
    warned = [calibration.is_unlike(image.statistics, float(np.mean(image.log_probs))) for calibration, image in pairs]
    return {
        "unit": "probabilities; a calibration error is the mean of |predicted - observed| over words or captions",
        "images": len(pairs),
        "values": {
            "word_calibration_error": round(word_error, 4),
            "caption_calibration_error": round(caption_error, 4),
            "supported_words": round(float(np.concatenate(outcomes).mean()), 4),
            "correlation_of_captions": round(float(np.corrcoef(*of_captions)[0, 1]), 4) if varied else None,
            "warned_images": round(float(np.mean(warned)), 4),
        },
        "words": words,
        "captions": curve,
    }


def summary(report: dict[str, Any]) -> str:
    """Return a report as one line for the terminal."""
    values = report["values"]
    return (
        f"calibrated on {report['images']} validation images: {100 * values['supported_words']:.1f} % of the words are "
        f"supported; each half judged by the other, the expected calibration error is "
        f"{values['word_calibration_error']:.3f}, and {100 * values['warned_images']:.1f} % of the images are unlike"
    )


def _source(settings: dict[str, Any]) -> CaptionSource:
    """Build the data source that a model's settings name."""
    data = settings.get("data")
    source = data.get("source") if isinstance(data, dict) else None
    if not isinstance(source, dict):
        raise InputError("--calibrate: the checkpoint names no data; it needs one that `captioning fit` saved")
    try:
        return known_class(source["class_path"], CaptionSource)(**source.get("init_args", {}))
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"--calibrate: data.source: {one_line(error)}") from error
