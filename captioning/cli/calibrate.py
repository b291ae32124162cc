"""`captioning export --calibrate`: the confidence of captions, fitted to one half of the validation images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from captioning.checkpoint.calibration import (
    Calibration,
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
    from captioning.captioner import ImageCaptioner
    from captioning.captioner.caption import Caption

REPORT = "calibration.json"


def calibrate(captioner: ImageCaptioner) -> tuple[Calibration, dict[str, Any]]:
    """Return a model's calibration, and how well it holds on the images that it was not fitted to.

    The model captions the validation images of its data settings with its own search. Every other image, beginning with
    the first, is fitted to. The others make the report: the expected calibration error of words and of captions with
    their reliability curves, and the fraction of images that the model would warn of.

    Raises:
        InputError: The model's settings name no data, these have no validation images or too few, or a file is missing.
    """
    source = _source(captioner.settings)
    source.tokenizer = captioner.vocabulary.tokenizer
    source.prepare()
    index = source.index("val")
    index.check_images()
    captioner.calibration = None
    captions = list(captioner.stream(index.image_path(row) for row in range(len(index))))
    supported = [
        is_supported(caption.words, [text.split() for text in index.references(row)])
        for row, caption in enumerate(captions)
    ]
    fitted, reported = slice(0, None, 2), slice(1, None, 2)
    calibration = fit(
        source.description,
        fit_views([view_statistics(caption.view) for caption in captions[fitted]]),
        [_word_log_probs(caption) for caption in captions[fitted]],
        supported[fitted],
    )
    return calibration, _report(calibration, captions[reported], supported[reported]) | {
        "images_fitted": len(captions[fitted]),
        "search": vars(captioner.options),
        "data": source.description,
        "split": "val",
    }


def _report(calibration: Calibration, captions: list[Caption], supported: list[list[bool]]) -> dict[str, Any]:
    """Return the report on captions that the calibration was not fitted to."""
    said = [row for row, caption in enumerate(captions) if caption.words]
    confidences = [np.array(calibration.confidences(_word_log_probs(captions[row]))) for row in said]
    outcomes = [np.array(supported[row], float) for row in said]
    word_error, words = reliability(np.concatenate(confidences), np.concatenate(outcomes))
    of_captions = np.array([values.mean() for values in confidences]), np.array([values.mean() for values in outcomes])
    caption_error, curve = reliability(*of_captions)
    warned = [calibration.is_unlike(captions[row].view, float(np.mean(_word_log_probs(captions[row])))) for row in said]
    return {
        "unit": "probabilities; a calibration error is the mean of |predicted - observed| over words or captions",
        "images": len(captions),
        "values": {
            "word_calibration_error": round(word_error, 4),
            "caption_calibration_error": round(caption_error, 4),
            "supported_words": round(float(np.concatenate(outcomes).mean()), 4),
            "correlation_of_captions": round(float(np.corrcoef(*of_captions)[0, 1]), 4),
            "warned_images": round(float(np.mean(warned)), 4),
        },
        "words": words,
        "captions": curve,
    }


def summary(report: dict[str, Any]) -> str:
    """Return a report as one line for the terminal."""
    values = report["values"]
    return (
        f"calibrated on {report['images_fitted']} validation images; on {report['images']} others "
        f"{100 * values['supported_words']:.1f} % of the words are supported, the expected calibration error is "
        f"{values['word_calibration_error']:.3f}, and {100 * values['warned_images']:.1f} % of the images are unlike"
    )


def _word_log_probs(caption: Caption) -> list[float]:
    return caption.log_probs[: len(caption.words)]


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
