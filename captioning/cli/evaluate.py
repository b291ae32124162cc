"""The command ``evaluate``: metrics of a file of captions. ``captioning test`` evaluates models."""

from pathlib import Path
from typing import Any

from captioning.cli import json_output
from captioning.errors import InputError
from captioning.files import JSON_SUFFIXES, check_output
from captioning.settings import Split


def evaluate(
    *,
    captions: Path,
    references: Path,
    split: Split = "test",
    tokenizer: str | None = None,
    json: Path | None = None,
) -> None:
    """Score a file of captions against references, with intervals by a bootstrap over images.

    To score a model, use `captioning test --ckpt_path MODEL`.

    Args:
        captions: The captions in the format of the COCO server, a JSON list of image_id and caption.
        references: COCO's annotations or Karpathy's file.
        split: Split of Karpathy's file.
        tokenizer: Class of the tokenizer, which may be yours; the default is PennTreebank, as in COCO's toolkit.
        json: Also write the metrics as JSON; - prints only them.

    Examples:
        captioning evaluate --captions mine.json --references captions_val2017.json
    """
    check_output(json, "--json", JSON_SUFFIXES, [captions, references])
    from captioning.evaluation.caption_files import read_references, read_results
    from captioning.metrics.resampling import RESAMPLES, intervals
    from captioning.metrics.table import TITLES, UNIT, family_counts, few_images_warning
    from captioning.vocabulary import tokenizer_from

    with json_output(json) as results:
        splitter = tokenizer_from(tokenizer)
        texts = read_results(captions)
        all_references = read_references(references, split=split, tokenizer=splitter)
        if unknown := [image_id for image_id in texts if image_id not in all_references]:
            problem = f"{len(unknown)} of {len(texts)} images have no references"
            raise InputError(f"{captions}: {problem}, among them image_id {unknown[0]}")
        hypotheses = [splitter.tokenize(caption) for caption in texts.values()]
        image_references, images = [all_references[image_id] for image_id in texts], len(texts)
        print(f"{images} captions of {len(all_references)} images with references{few_images_warning(images)}")
        print(f"{'':12}{'metric':>8}  {'95 % interval':>18}")
        values: dict[str, Any] = {}
        for family, counts in family_counts(hypotheses, image_references, meteor=splitter.english):
            for name, metric in zip(family.metrics, intervals(counts, family.statistic), strict=True):
                print(f"{TITLES[name]:12}{metric.value:8.2f}  {f'{metric.low:.2f} to {metric.high:.2f}':>18}")
                values[TITLES[name]] = {"value": metric.value, "interval": [metric.low, metric.high]}
        results |= {"values": values, "unit": UNIT, "images": images, "tokens": splitter.description}
        print(f"{UNIT}. Intervals: bootstrap over images, {RESAMPLES} resamples.\nTokens: {splitter.description}.")
