"""The files that an evaluation writes beside a run, and their schema: STAGE_metrics.json and STAGE_captions.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from captioning.evaluation.files import converted, write_results
from captioning.files import read_json, write_json, write_text

_EXPECTED = "what `captioning test` writes"


@dataclass(frozen=True)
class NounHit:
    """Attention at a noun that names an object in view, judged by where the object is.

    Attributes:
        step: Position of the noun in the caption, that of the last word of several.
        noun: The noun as the caption has it.
        hit: Whether the strongest location touches the object.
        chance: Probability that a random location is a hit: the fraction of locations that touch the object.
        centre_hit: Probability that a central location is a hit. There are one, two or four of these, as the height
            and width of the grid are odd or even.
        correctness: Fraction of the attention on the object (Liu et al. 2017).
        uniform: The same for even attention: the fraction of the view that the object covers.
        centre: The same for ``grounding.centre_attention``.
        location: The strongest location. None if it is not known: an earlier version did not keep it.
    """

    step: int
    noun: str
    hit: bool
    chance: float
    centre_hit: float
    correctness: float
    uniform: float
    centre: float
    location: int | None = None


NOUN_METRICS = {
    "pointing_accuracy": "hit",
    "pointing_chance": "chance",
    "pointing_centre": "centre_hit",
    "attention_correctness": "correctness",
    "correctness_uniform": "uniform",
    "correctness_centre": "centre",
}
"""Metrics of attention at nouns, and the field of ``NounHit`` whose mean each is."""


@dataclass(frozen=True, kw_only=True)
class CaptionedImage:
    """One evaluated image, an entry of STAGE_captions.json.

    Attributes:
        image_id: The data set's number of the image.
        caption: The model's words, joined by spaces.
        log_prob: What the search ranks captions by: the sum over words in nats, divided by the length normalisation.
        finished: False if the maximum length cut the caption off.
        references: The references' words, joined by spaces.
        written: The caption as the tokenizer writes it, if that differs from ``caption``.
        hits, reference_hits: Every noun of the caption and of the references that names an object.
        posterior_hits, reference_posterior_hits: The same with the posterior of the locations given the word; empty
            if the model has none.
    """

    image_id: int
    caption: str
    log_prob: float | None = None
    finished: bool | None = None
    references: list[str]
    written: str | None = None
    hits: list[NounHit] = field(default_factory=list)
    reference_hits: list[NounHit] = field(default_factory=list)
    posterior_hits: list[NounHit] = field(default_factory=list)
    reference_posterior_hits: list[NounHit] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.caption if self.written is None else self.written

    @property
    def words(self) -> list[str]:
        return self.caption.split()

    @property
    def reference_words(self) -> list[list[str]]:
        return [reference.split() for reference in self.references]


def write_evaluation(
    folder: Path, stage: str, metrics: Mapping[str, float], images: Sequence[CaptionedImage], **facts: Any
) -> None:
    """Write STAGE_metrics.json, STAGE_captions.json and STAGE_results.json, the COCO server's file.

    Args:
        stage: "val" or "test".
        facts: What the metrics' file says besides where it is not empty: "search", the options that the captions were
            made with; "tokens", the words that are compared; "cells", the grid that pointing was judged on;
            "provenance" of the model and the metrics.
    """
    content = {f"{stage}/{name}": value for name, value in metrics.items()}
    write_json(folder / f"{stage}_metrics.json", content | {name: fact for name, fact in facts.items() if fact})
    entries = [dataclasses.asdict(image) for image in images]
    for entry in entries:
        if entry["written"] is None:
            del entry["written"]
    write_json(folder / f"{stage}_captions.json", entries)
    write_results(folder / f"{stage}_results.json", [(image.image_id, image.text) for image in images])


def write_predictions(folder: Path, paths: Sequence[Path], images: Sequence[CaptionedImage]) -> tuple[Path, Path]:
    """Write captions of images without references, and return the two files.

    Returns:
        predictions.jsonl, with a line ``{"image", "image_id", "caption", "log_prob"}`` for each image, and
        predict_results.json, the COCO server's file.
    """
    lines, results = folder / "predictions.jsonl", folder / "predict_results.json"
    entries = [
        {"image": str(path), "image_id": image.image_id, "caption": image.text, "log_prob": image.log_prob}
        for path, image in zip(paths, images, strict=True)
    ]
    write_text(lines, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries))
    write_results(results, [(image.image_id, image.text) for image in images])
    return lines, results


def read_metrics(path: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the metrics of STAGE_metrics.json without their prefix, and the options of the search."""
    content = converted(path, read_json(path), dict[str, Any], _EXPECTED)
    metrics = {name.partition("/")[2]: value for name, value in content.items() if isinstance(value, (int, float))}
    return metrics, dict(content.get("search", {}))


def read_captions(path: Path) -> dict[int, CaptionedImage]:
    """Return the images of STAGE_captions.json by their id. What earlier versions wrote besides is ignored."""
    images = converted(path, read_json(path), list[CaptionedImage], _EXPECTED)
    return {image.image_id: image for image in images}
