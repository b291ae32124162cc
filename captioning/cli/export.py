"""Write a trained captioner as a folder to pass on: weights as safetensors, configuration, vocabulary, model card.

The card describes the model, its training, and the scores with intervals that `captioning test` and `captioning
validate` left in the checkpoint's run folder. Nothing in the folder runs when it is opened; `load(DIR)` of
captioning.captioner captions with it. With --onnx it also has encoder.onnx and step.onnx, which scripts/caption_onnx.py
captions with, without PyTorch.

With --calibrate the model captions the validation images of its data settings. Half of them fit the confidence of
captions, and what images the model is used to; calibration.json tells how well that holds on the other half.

examples:
  captioning export runs/shapes_soft/checkpoints/best.ckpt --output exported/shapes_soft
  captioning export best.ckpt --output exported/mine --license cc-by-4.0 --dtype float16
  captioning export best.ckpt --output exported/mine --onnx
  captioning export best.ckpt --output exported/mine --calibrate
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captioning.cli.arguments import add_import_option, script_parser
from captioning.errors import InputError, exits_on_input_error
from captioning.files import refuse_inputs, write_json
from captioning.provenance import provenance
from captioning.run_folder import RunFolder

if TYPE_CHECKING:
    from captioning.captioner import ImageCaptioner
    from captioning.tokenizers import Tokenizer


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    arguments = _parse(argv)
    from captioning.captioner import load
    from captioning.checkpoint.export import WEIGHTS, refuse_other_folder
    from captioning.checkpoint.onnx_graphs import ENCODER, STEP, write_onnx
    from captioning.cli.calibrate import REPORT, calibrate, summary
    from captioning.component import import_modules

    folder = Path(arguments.output)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output {folder}: is a file; give a folder")
    if not arguments.onnx and any((folder / name).exists() for name in (ENCODER, STEP)):
        raise InputError(f"--output {folder}: has an earlier model's ONNX graphs; give --onnx, too, or another folder")
    refuse_other_folder(folder)
    refuse_inputs(folder / WEIGHTS, [arguments.checkpoint], "--output")
    import_modules(arguments.imports, [Path()])
    captioner = load(arguments.checkpoint)
    run = RunFolder.of(arguments.checkpoint)
    name = run.path.resolve().name if run else Path(arguments.checkpoint).stem
    report = None
    if arguments.calibrate:
        captioner.calibration, report = calibrate(captioner)
    if arguments.onnx:
        write_onnx(captioner.captioner, folder)
    checkpoint = Path(arguments.checkpoint).name
    text = card(captioner, name, run.path if run else None, checkpoint, arguments.license)
    captioner.export(folder, text, dtype=arguments.dtype)
    if report is not None:
        command = f"captioning export {shlex.join(sys.argv[1:] if argv is None else argv)}"
        write_json(folder / REPORT, report | provenance(command=command, seed=None), indent=1)
        print(summary(report))
    else:
        (folder / REPORT).unlink(missing_ok=True)  # of an earlier model
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) / 1e6
    print(f"written to {folder} ({size:.1f} MB): {', '.join(sorted(file.name for file in folder.iterdir()))}")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__, "export")
    parser.add_argument("checkpoint", metavar="FILE.ckpt", help="what `captioning fit` saved")
    parser.add_argument("--output", required=True, metavar="DIR", help="the folder to write")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default="float32",
        help="type that the weights are stored in; float16 halves the file (default: float32)",
    )
    parser.add_argument("--license", metavar="NAME", help="of the weights, such as cc-by-4.0; the card names it")
    parser.add_argument("--onnx", action="store_true", help="write the model as ONNX graphs as well")
    parser.add_argument("--calibrate", action="store_true", help="fit the confidence of captions to validation images")
    add_import_option(parser)
    return parser.parse_args(argv)


def card(captioner: ImageCaptioner, name: str, run: Path | None, checkpoint: str, license: str | None) -> str:
    """Return the model card, Markdown with a YAML head.

    Args:
        captioner: The captioner.
        name: The title of the card.
        run: The folder with the results of tests; None if there is none.
        checkpoint: File name of the checkpoint. Results of other checkpoints are left out.
        license: License of the weights; the card says so if it is None.
    """
    head = ["---", "library_name: captioning", "pipeline_tag: image-to-text"]
    head += ["tags: [image-captioning, visual-attention]", *([f"license: {license}"] if license else [])]
    licence = license or "Of the weights: not stated; ask whoever gave you this folder"
    sections = [
        "\n".join([*head, "---"]),
        f"# {name}",
        "An image captioner with visual attention (*Show, Attend and Tell*, Xu et al. 2015).",
        _usage(),
        "## Model\n\n" + _table(("part", "what"), _parts(captioner)),
        "## Training\n\n" + _training(captioner.settings),
        "## Scores\n\n" + _scores(run, checkpoint, captioner.vocabulary.tokenizer),
        "## Limits\n\n" + _limits(captioner),
        f"## Licence\n\n{licence}. Training data have licences of their own.",
    ]
    return "\n\n".join(sections) + "\n"


def _usage() -> str:
    return """```python
from captioning.captioner import load

caption = load("THIS_FOLDER")("photo.jpg")
print(caption.text)
caption.save_figure("attention.png")
```"""


def _parts(captioner: ImageCaptioner) -> list[tuple[str, str]]:
    encoder, decoder = captioner.encoder, captioner.captioner.decoder
    grid, pixels = (" x ".join(map(str, size)) for size in (encoder.grid_size, encoder.preprocessing.size))
    in_encoder, in_decoder = (sum(p.numel() for p in module.parameters()) for module in (encoder, decoder))
    in_attention = sum(p.numel() for attention in decoder.attentions() for p in attention.parameters())
    return [
        ("encoder", f"{type(encoder).__name__}, {in_encoder:,} parameters, {pixels} pixels"),
        ("annotations", f"{grid} locations of {encoder.annotation_dim}"),
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
        "epochs, at most": trainer.get("max_epochs"),
        "precision": trainer.get("precision"),
        "optimizer": _class(model.get("optimizer")),
        "label smoothing": model.get("label_smoothing"),
        "attention penalty": model.get("attention_penalty"),
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
    from captioning.evaluation.scores import UNIT

    note = f"{UNIT}. Intervals: bootstrap over images. Tokens: {tokenizer.description}. nll in nats per word."
    return "\n\n".join([*tables, note])


def _splits(run: Path, checkpoint: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a table for each split on which this checkpoint was scored, with 95 % intervals over its images."""
    from captioning.evaluation.records import read_captions, read_scores

    for stage, title in (("test", "Test split"), ("val", "Validation split")):
        metrics, captions = (run / f"{stage}_{what}.json" for what in ("metrics", "captions"))
        if not (metrics.is_file() and captions.is_file()):
            continue
        scores, search = read_scores(metrics)
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
    from captioning.evaluation.resampling import intervals
    from captioning.evaluation.scores import count

    hypotheses, references = [image.words for image in images], [image.reference_words for image in images]
    return [
        (title, float(value), float(low), float(high))
        for family, counts in count(hypotheses, references, java=java)
        for title, (value, low, high) in zip(family.titles, intervals(counts, family.scores).T, strict=True)
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
