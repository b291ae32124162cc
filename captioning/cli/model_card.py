"""The model card of an exported captioner: what it is, what it learned from, its scores, limits and licence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from captioning.evaluation.metrics import UNIT, count
from captioning.evaluation.records import read_captions, read_metrics
from captioning.evaluation.resampling import intervals
from captioning.inference import ImageCaptioner
from captioning.tokenizers import Tokenizer


def card(
    captioner: ImageCaptioner, name: str, run: Path | None, checkpoint: str, license: str | None, notes: str = ""
) -> str:
    """Return the model card, Markdown with a YAML head.

    Args:
        captioner: The captioner.
        name: The title of the card.
        run: The folder with the results of tests; None if there is none.
        checkpoint: File name of the checkpoint. Results of other checkpoints are left out.
        license: License of the weights; the card says so if it is None.
        notes: What only a person knows, in Markdown. A section ``## TITLE`` replaces the card's own of that title, or
            follows the others; what comes before the first section replaces the card's beginning.
    """
    head = ["---", "library_name: captioning", "pipeline_tag: image-to-text"]
    head += ["tags: [image-captioning, visual-attention]", *([f"license: {license}"] if license else [])]
    licence = license or "Of the weights: not stated; ask whoever gave you this folder"
    sections = {
        "": f"# {name}\n\n{_BEGINNING}",
        "Model": _table(("component", "description"), _parts(captioner)),
        "Training": _training(captioner.settings),
        "Scores": _scores(run, checkpoint, captioner.vocabulary.tokenizer),
        "Limits": _limits(captioner),
        "Licence": f"{licence}. Training data have licences of their own.",
    }
    sections |= _sections(notes)
    texts = [f"## {title}\n\n{text}" if title else text for title, text in sections.items()]
    return "\n\n".join(["\n".join([*head, "---"]), *texts]) + "\n"


_BEGINNING = """An image captioner with visual attention (*Show, Attend and Tell*, Xu et al. 2015).

```python
from captioning.inference import load

caption = load("THIS_FOLDER")("photo.jpg")
print(caption.text)
caption.save_figure("attention.png")
```"""


def _sections(notes: str) -> dict[str, str]:
    """Return the sections of a Markdown text by their titles; the title of its beginning is ""."""
    beginning, *rest = re.split(r"^## +", notes, flags=re.MULTILINE)
    titled = [section.partition("\n") for section in rest]
    sections = {"": beginning} | {title.strip(): text for title, _, text in titled}
    return {title: text.strip() for title, text in sections.items() if text.strip()}


def _parts(captioner: ImageCaptioner) -> list[tuple[str, str]]:
    encoder, decoder = captioner.encoder, captioner.model.decoder
    grid, pixels = (" x ".join(map(str, size)) for size in (encoder.grid_size, encoder.preprocessing.size))
    (y, x), (down, across), error = encoder.cells.offset, encoder.cells.stride, max(encoder.cells.standard_error)
    first = f"{y:g} pixels down and {x:g} across" + f" (standard error {error:.2g})" * (error > 0)
    in_encoder, in_decoder = (sum(p.numel() for p in module.parameters()) for module in (encoder, decoder))
    in_attention = sum(p.numel() for attention in decoder.attentions() for p in attention.parameters())
    return [
        ("encoder", f"{type(encoder).__name__}, {in_encoder:,} parameters, {pixels} pixels"),
        ("annotations", f"{grid} locations, {encoder.annotation_dim} channels"),
        ("cells", f"{down:g} x {across:g} pixels; the centre of the first is {first}"),
        ("attention", f"{type(decoder.attention).__name__}, {in_attention:,} parameters"),
        ("decoder", f"{decoder.summary}, {in_decoder - in_attention:,} parameters"),
        ("vocabulary", f"{len(captioner.vocabulary.words):,} words"),
        ("tokenizer", f"{type(captioner.vocabulary.tokenizer).__name__}: {captioner.vocabulary.tokenizer.description}"),
    ]


def _training(settings: dict[str, Any]) -> str:
    if not settings:
        return "Its settings were not saved."
    sections = (settings.get(name) for name in ("data", "trainer", "model"))
    data, trainer, model = (section if isinstance(section, dict) else {} for section in sections)
    shown = {
        "data": _class(data.get("source")),
        "batch size": data.get("batch_size"),
        "largest number of epochs": trainer.get("max_epochs"),
        "precision": trainer.get("precision"),
        "optimizer": _class(model.get("optimizer")),
        "objective": _class(model.get("objective")),
        "seed": settings.get("seed_everything"),
        "mean of the weights of": _averaged(settings.get("averaged")),
    }
    rows = [(name, str(value)) for name, value in shown.items() if value is not None]
    return _table(("setting", "value"), rows) + "\n\nAll settings are in `config.json`."


def _averaged(checkpoints: Any) -> str | None:
    """Return the checkpoints that ``captioning average`` noted."""
    members = checkpoints if isinstance(checkpoints, list) else []
    return ", ".join(str(member.get("checkpoint")) for member in members if isinstance(member, dict)) or None


def _class(config: Any) -> str | None:
    """Return a class's name with its plain arguments."""
    if not isinstance(config, dict) or "class_path" not in config:
        return None
    arguments = config.get("init_args")
    arguments = arguments if isinstance(arguments, dict) else {}
    plain = [f"{name} {value}" for name, value in arguments.items() if isinstance(value, (int, float, str))]
    return ", ".join([str(config["class_path"]).rpartition(".")[2], *plain])


def _scores(run: Path | None, checkpoint: str, tokenizer: Tokenizer) -> str:
    tables = [] if run is None else list(_splits(run, checkpoint, tokenizer))
    if not tables:
        return "It was not tested: run `captioning test --ckpt_path FILE` and export again."
    note = (
        f"Scores in {UNIT}. nll: negative log-likelihood in nats per word. Intervals: bootstrap over images. "
        f"Tokens: {tokenizer.description}."
    )
    return "\n\n".join([*tables, note])


def _splits(run: Path, checkpoint: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a table for each split on which this checkpoint was scored, with 95 % intervals over its images."""
    for stage, title in (("test", "Test split"), ("val", "Validation split")):
        metrics, captions = (run / f"{stage}_{what}.json" for what in ("metrics", "captions"))
        if not (metrics.is_file() and captions.is_file()):
            continue
        scores, search = read_metrics(metrics)
        if search.pop("checkpoint", checkpoint) != checkpoint:
            continue
        images = read_captions(captions)
        with_intervals = _with_intervals(list(images.values()), java=tokenizer.english)
        rows = [(name, f"{value:.2f}", f"{low:.2f} to {high:.2f}") for name, value, low, high in with_intervals]
        rows += [(name, f"{scores[name]:.2f}", "") for name in ("nll", "pointing_accuracy") if name in scores]
        split = search.pop("split", None)  # that `captioning test` was told to use
        title = {"val": "Validation split", "train": "Training split"}.get(split, title)
        how = ", ".join(f"{name} {value}" for name, value in search.items())
        yield f"{title}, {len(images)} images; {how}.\n\n{_table(('score', 'value', '95 % interval'), rows)}"


def _with_intervals(images: list[Any], *, java: bool) -> list[tuple[str, float, float, float]]:
    hypotheses, references = [image.words for image in images], [image.reference_words for image in images]
    return [
        (title, float(value), float(low), float(high))
        for family, counts in count(hypotheses, references, java=java)
        for title, (value, low, high) in zip(family.titles, intervals(counts, family.values).T, strict=True)
    ]


def _limits(captioner: ImageCaptioner) -> str:
    words = captioner.vocabulary.words
    return "\n".join(
        [
            f"- It knows {len(words):,} words, those of its training captions, and no others.",
            "- It describes images like those it was trained on; for other images its captions are fluent and wrong.",
            "- Attention shows which locations the words were computed from. It does not prove why a word was chosen.",
            "- It learned from what people wrote about the training images, their prejudices included.",
        ]
    )


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', ' ').replace(chr(10), ' ') for cell in line)} |" for line in lines
    )
