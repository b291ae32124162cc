"""The model card of an exported captioner, from the template model_card.md."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from captioning.earlier_names import renamed_results
from captioning.files import read_json
from captioning.model.captioner import Captioner
from captioning.run_folder import RunFolder, is_current
from captioning.settings import flatten
from captioning.vocabulary import Vocabulary

UNTESTED = "It was not tested."


def model_card(
    captioner: Captioner,
    vocabulary: Vocabulary,
    settings: Mapping[str, Any],
    name: str,
    *,
    checkpoint: Path | None = None,
    license: str | None = None,
    notes: str = "",
) -> str:
    """Return the model card, Markdown with a YAML head.

    Args:
        settings: The full training configuration.
        checkpoint: The model's file; the card has the metrics of the tests of these weights in the file's run folder.
        license: License of the weights.
        notes: Further Markdown. A section ``## TITLE`` replaces the card's section with that title, or is appended if
            the card has none. Text before the first section replaces the card's beginning.
    """
    encoder, decoder = captioner.encoder, captioner.decoder
    start = settings.get("init_from")
    template = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    text = template.format(
        name=name,
        encoder=encoder,
        encoder_parameters=sum(parameter.numel() for parameter in encoder.parameters()),
        pixels=encoder.preprocessing.size[0],
        decoder=decoder,
        decoder_parameters=sum(parameter.numel() for parameter in decoder.parameters()),
        words=len(vocabulary.words),
        tokens=vocabulary.tokenizer.description,
        data=flatten(settings).get("data.source", "unknown"),
        start=f" It began with the weights of `{start}`, whose license holds, too." if start else "",
        metrics=_metrics(checkpoint),
        license=license or "Of the weights: not stated; ask whoever gave you this folder",
    )
    head = "---\nlibrary_name: captioning\npipeline_tag: image-to-text\ntags: [image-captioning, visual-attention]\n"
    head += f"{yaml.safe_dump({'license': license})}---" if license else "---"
    return "\n\n".join([head, *(_sections(text) | _sections(notes)).values()]) + "\n"


def _sections(markdown: str) -> dict[str, str]:
    """Return the sections of a text by title; the text before the first section has the title ""."""
    start, *pieces = re.split(r"^## +(.*)$", markdown, flags=re.MULTILINE)
    sections = {title.strip(): f"## {title}{text}" for title, text in zip(pieces[::2], pieces[1::2], strict=True)}
    return {title: text.strip() for title, text in ({"": start} | sections).items() if text.strip()}


def _metrics(checkpoint: Path | None) -> str:
    """Return a table of metrics for each split on which this checkpoint was tested."""
    if checkpoint is None or (run := RunFolder.of_checkpoint(checkpoint)) is None:
        return UNTESTED
    tables = []
    for path in (run.path / "test_metrics.json", run.path / "val_metrics.json"):
        content = read_json(path, object_hook=renamed_results) if path.is_file() else {}
        conditions = content.get("conditions", {})
        is_current_test = is_current(conditions.pop("weights", ""), checkpoint)
        if content and conditions.pop("checkpoint", checkpoint.name) == checkpoint.name and is_current_test:
            split = conditions.pop("split", path.name.partition("_")[0])
            text = ", ".join(f"{name} {value}" for name, value in conditions.items())
            images = path.with_name(path.name.replace("metrics", "captions"))
            if images.is_file():
                text = f"{len(read_json(images))} images; {text}"
            metrics = {key.partition("/")[2]: value for key, value in content.items() if isinstance(value, float)}
            rows = [f"| {name} | {value:.2f} |" for name, value in metrics.items()]
            tables.append("\n".join([f"Split {split}; {text}.\n", "| metric | value |", "| --- | --- |", *rows]))
    return "\n\n".join(tables) or UNTESTED
