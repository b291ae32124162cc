"""What an evaluation leaves beside a run, STAGE_metrics.json and STAGE_captions.json: its schema, written and read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from captioning.errors import InputError
from captioning.evaluation.files import write_results
from captioning.files import read_json, write_json, write_text


@dataclass(frozen=True)
class NounHit:
    """What attention did at a noun that names an object in view. Runs of earlier versions lack the last four, None.

    Attributes:
        step: position in the caption of the noun, its last word where it has several.
        noun: as the caption has it.
        hit: whether the strongest location touches the object.
        chance: share of all locations that touch it: the probability that a random location is a hit.
        centre_hit: share of the central locations (the one in the middle; two or four where rows or columns are even)
            that touch it: the probability that one who always points at the centre hits.
        correctness: share of the attention's mass on the object (Liu et al. 2017).
        uniform: the same for attention that is spread evenly: the object's share of the view.
        centre: the same for ``grounding.centre_attention``.
    """

    step: int
    noun: str
    hit: bool
    chance: float
    centre_hit: float | None = None
    correctness: float | None = None
    uniform: float | None = None
    centre: float | None = None


@dataclass(frozen=True, kw_only=True)
class CaptionedImage:
    """One evaluated image; an entry of STAGE_captions.json has its fields. Older files may lack those with defaults.

    Attributes:
        image_id: the data set's own number.
        caption: what the model said, words joined by spaces.
        log_prob: what captions are ranked by: the sum over words in nats, divided by the length normalisation.
        finished: False when the maximum length cut the caption off.
        references: what people said, as ``caption``.
        written: the caption as people write it, where that is not its words with spaces between them.
        hits, reference_hits: of every noun that names an object, of the caption and of the references.
        posterior_hits, reference_posterior_hits: the same by the attention that a noun has once it is known; empty
            where words do not come from single locations.
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
    folder: Path,
    stage: str,
    scores: Mapping[str, float],
    images: Sequence[CaptionedImage],
    *,
    search: Mapping[str, Any],
    tokens: str = "",
) -> None:
    """Write STAGE_metrics.json, STAGE_captions.json and STAGE_results.json, the COCO server's file.

    Args:
        stage: "val" or "test".
        search: how the captions were made.
        tokens: what words were compared.
    """
    content: dict[str, Any] = {f"{stage}/{name}": value for name, value in scores.items()} | {"search": dict(search)}
    if tokens:
        content["tokens"] = tokens
    write_json(folder / f"{stage}_metrics.json", content)
    entries = [dataclasses.asdict(image) for image in images]
    for entry in entries:
        if entry["written"] is None:
            del entry["written"]
    write_json(folder / f"{stage}_captions.json", entries)
    write_results(folder / f"{stage}_results.json", [(image.image_id, image.text) for image in images])


def write_predictions(folder: Path, paths: Sequence[Path], images: Sequence[CaptionedImage]) -> tuple[Path, Path]:
    """Write captions that nothing is compared with, and return the files.

    Returns:
        predictions.jsonl, a line ``{"image", "image_id", "caption", "log_prob"}`` for each image, and
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


def read_scores(path: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the scores of STAGE_metrics.json without their prefix, and how the captions were made.

    Raises:
        InputError: the file is damaged.
    """
    content = _read_json(path, dict)
    search = content.pop("search", {})
    if not isinstance(search, dict):
        raise InputError(f"{path}: its search is no mapping, which `captioning test` writes; run it again")
    return {name.partition("/")[2] or name: value for name, value in content.items() if _is_number(value)}, search


def read_captions(path: Path) -> dict[int, CaptionedImage]:
    """Return the images of STAGE_captions.json by their id.

    Raises:
        InputError: the file is damaged.
    """
    try:
        return {entry["image_id"]: _captioned_image(entry) for entry in _read_json(path, list)}
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: not what `captioning test` writes ({error!r}); run it again") from error


def _captioned_image(entry: dict[str, Any]) -> CaptionedImage:
    fields = _known(CaptionedImage, entry)
    for name in ("hits", "reference_hits", "posterior_hits", "reference_posterior_hits"):
        if name in fields:
            fields[name] = [_noun_hit(hit) for hit in fields[name]]
    image = CaptionedImage(**fields)
    texts = [image.caption, *image.references] if isinstance(image.references, list) and image.references else [None]
    if type(image.image_id) is not int or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"image {image.image_id!r:.40}: its caption or references are no texts, or there is none")
    if image.log_prob is not None and not _is_number(image.log_prob):
        raise TypeError(f"image {image.image_id}: its log_prob is no number")
    return image


def _noun_hit(entry: dict[str, Any]) -> NounHit:
    hit = NounHit(**_known(NounHit, entry))
    optional = (hit.centre_hit, hit.correctness, hit.uniform, hit.centre)
    numbers = [hit.hit, hit.chance, *(value for value in optional if value is not None)]
    if type(hit.step) is not int or not isinstance(hit.noun, str) or not all(map(_is_number, numbers)):
        raise TypeError(f"a hit is none: {entry!r:.80}")
    return hit


def _is_number(value: Any) -> bool:
    """Return whether a value is a number that scores are computed with; NaN is one, in scores of too few images."""
    return isinstance(value, (int, float))


def _known(kind: type, entry: dict[str, Any]) -> dict[str, Any]:
    """Return what ``kind`` has a field for; a later version may have written more."""
    return {item.name: entry[item.name] for item in dataclasses.fields(kind) if item.name in entry}


def _read_json(path: Path, kind: type) -> Any:
    content = read_json(path)
    if not isinstance(content, kind):
        raise InputError(f"{path}: not what `captioning test` writes; run it again")
    return content
