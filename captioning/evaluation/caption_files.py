"""Files of captions: the results of an evaluation, the COCO server's format, and references."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from captioning.earlier_names import renamed_results
from captioning.errors import InputError
from captioning.files import read_json, write_json, write_text
from captioning.tokenizers import Tokenizer

_EXPECTED = "what `captioning test` writes"


@dataclass(frozen=True)
class NounHit:
    """Attention at a noun that names an object in view, judged by where the object is."""

    step: int  # position of the noun's last word in the caption
    noun: str  # as in the caption
    hit: bool  # whether the strongest location touches the object
    chance: float  # probability that a random location is a hit: the fraction of locations that touch the object
    center_hit: float  # fraction of the 1, 2 or 4 central locations that touch the object
    correctness: float  # fraction of the attention on the object (Liu et al. 2017)
    uniform_correctness: float  # of even attention: the fraction of the view that the object covers
    center_correctness: float  # of ``grounding.center_attention``
    location: int | None = None  # the strongest location; None in files of an earlier version


@dataclass(frozen=True, kw_only=True)
class CaptionedImage:
    """One evaluated image, an entry of STAGE_captions.json. Captions and references are words joined by spaces."""

    image_id: int  # the data set's id
    file: str | None = None  # the image file; None in files of an earlier version
    caption: str
    log_prob: float | None = None  # the search's criterion: the sum over words in nats, over the length normalization
    finished: bool | None = None  # False if the maximum length cut the caption off
    references: list[str]
    written: str | None = None  # the caption as the tokenizer writes it, if that differs
    hits: list[NounHit] = field(default_factory=list)  # one for every noun of the caption that names an object
    reference_hits: list[NounHit] = field(default_factory=list)
    evidence_hits: list[NounHit] = field(default_factory=list)  # hits of the evidence instead of the alphas
    reference_evidence_hits: list[NounHit] = field(default_factory=list)

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
        facts: Further entries of STAGE_metrics.json that are not empty: "conditions" (of the test, with its search),
            "tokens" (the tokenizer's description), "cells" (the grid of the hits), "provenance" (of model and metrics).
    """
    content = {f"{stage}/{name}": value for name, value in metrics.items()}
    write_json(folder / f"{stage}_metrics.json", content | {name: fact for name, fact in facts.items() if fact})
    entries = [{name: v for name, v in asdict(image).items() if v is not None} for image in images]
    write_json(folder / f"{stage}_captions.json", entries)
    write_results(folder / f"{stage}_results.json", images)


def write_predictions(folder: Path, images: Sequence[CaptionedImage]) -> tuple[Path, Path]:
    """Write predictions.jsonl, which has a line for each image, and predict_results.json, the COCO server's file."""
    lines, results = folder / "predictions.jsonl", folder / "predict_results.json"
    entries = [
        {"image": image.file, "image_id": image.image_id, "caption": image.text, "log_prob": image.log_prob}
        for image in images
    ]
    write_text(lines, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries))
    write_results(results, images)
    return lines, results


def read_metrics(path: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the metrics of STAGE_metrics.json without the prefix "STAGE/", and the conditions of the test."""
    content = convert(path, read_json(path, object_hook=renamed_results), dict[str, Any], _EXPECTED)
    metrics = {name.partition("/")[2]: value for name, value in content.items() if isinstance(value, (int, float))}
    return metrics, content.get("conditions", {})


def read_captions(path: Path) -> dict[int, CaptionedImage]:
    """Return the images of STAGE_captions.json by their id. Fields of earlier versions are ignored."""
    images = convert(path, read_json(path, object_hook=renamed_results), list[CaptionedImage], _EXPECTED)
    return {image.image_id: image for image in images}


class CaptionEntry(msgspec.Struct):
    """An entry of a file in COCO's format: a caption and the id of its image."""

    image_id: int
    caption: str


def convert(path: Path, content: Any, content_type: Any, expected: str) -> Any:
    """Return the content of a JSON file as ``content_type``. Raises InputError, which quotes ``expected``."""
    try:
        return msgspec.convert(content, content_type)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: expected {expected}: {error}") from error


def write_results(path: Path, images: Sequence[CaptionedImage]) -> None:
    """Write image ids and captions as the COCO server takes them, ``[{"image_id": 17, "caption": ..}, ..]``."""
    write_json(path, [{"image_id": image.image_id, "caption": image.text} for image in images], indent=None)


def read_results(path: Path) -> dict[int, str]:
    """Return the captions of a results file by image id. Raises InputError if an image has two captions."""
    captions: dict[int, str] = {}
    content = read_json(path, "give a list as in predict_results.json")
    for entry in convert(path, content, list[CaptionEntry], '[{"image_id": 17, "caption": "a dog"}, ..]'):
        if entry.image_id in captions:
            raise InputError(f"{path}: image_id {entry.image_id} has two captions; only one is allowed")
        captions[entry.image_id] = entry.caption
    if not captions:
        raise InputError(f"{path}: holds no caption")
    return captions


def read_references(path: Path, *, split: str, tokenizer: Tokenizer) -> dict[int, list[list[str]]]:
    """Return the word lists of each image's references, by image id.

    Karpathy's file (``dataset_coco.json``) is read as by ``KarpathySource``; COCO's (``captions_val2017.json``) holds
    one split. References without a word are left out. Raises InputError for another format, or without references.
    """
    content = read_json(path, "give COCO's or Karpathy's JSON file")
    references: dict[int, list[list[str]]] = {}
    if isinstance(content, dict) and "annotations" in content:
        for entry in convert(path, content["annotations"], list[CaptionEntry], "COCO's annotations"):
            if words := tokenizer.tokenize(entry.caption):
                references.setdefault(entry.image_id, []).append(words)
    elif isinstance(content, dict) and "images" in content:
        from captioning.data.karpathy import KarpathySource

        source = KarpathySource(str(path), image_dir="")
        source.tokenizer = tokenizer
        index = source.index(split)
        for row, image_id in enumerate(index.image_ids.tolist()):
            references[image_id] = [caption.split() for caption in index.references(row)]
    else:
        raise InputError(f"{path}: no references, expected COCO's annotations or Karpathy's images")
    if not references:
        raise InputError(f"{path}: holds no caption")
    return references
