"""Write a trained captioner as a folder for others: weights, settings, vocabulary, model card.

The weights are stored as safetensors, and opening the folder runs no code. The card has the scores
that `captioning test` wrote to the run's folder. Other commands take the folder as --model DIR.

examples:
  captioning export --model runs/shapes_soft/checkpoints/best.ckpt --output exported/shapes_soft
  captioning export --model best.ckpt --output exported/mine --license cc-by-4.0 --dtype float16
"""

from __future__ import annotations

import argparse
from pathlib import Path

from captioning.cli.arguments import add_import_option, add_model_option, script_parser
from captioning.cli.usage import check_tool
from captioning.errors import InputError, exits_on_input_error, one_line
from captioning.files import refuse_inputs
from captioning.run_folder import RunFolder


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    check_tool("export", [arguments.model], arguments.imports)
    from captioning.checkpoint.export import WEIGHTS, refuse_other_folder, stored_weights
    from captioning.checkpoint.model_card import card
    from captioning.checkpoint.onnx_graphs import ENCODER, STEP, write_onnx
    from captioning.component import import_modules
    from captioning.inference import load

    folder = Path(arguments.output)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output {folder}: is a file; give a folder")
    if not arguments.onnx and any((folder / name).exists() for name in (ENCODER, STEP)):
        raise InputError(f"--output {folder}: has an earlier model's ONNX graphs; give --onnx, too, or another folder")
    refuse_other_folder(folder)
    for written in (folder, folder / WEIGHTS):
        refuse_inputs(written, [arguments.model], "--output")
    notes = "" if arguments.notes is None else _read_notes(arguments.notes)
    import_modules(arguments.imports, [Path()])
    captioner = load(arguments.model)
    run = RunFolder.of(arguments.model)
    name = run.path.resolve().name if run else Path(arguments.model).stem
    if arguments.onnx:
        stored_weights(captioner.model, arguments.dtype)  # refuses a weight before a graph is written
        write_onnx(captioner.model, folder)
    checkpoint = Path(arguments.model).name
    text = card(
        captioner.model,
        captioner.vocabulary,
        captioner.settings,
        name,
        run=run.path if run else None,
        checkpoint=checkpoint,
        license=arguments.license,
        notes=notes,
    )
    captioner.export(folder, text, dtype=arguments.dtype)
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) / 1e6
    print(f"written to {folder} ({size:.1f} MB): {', '.join(sorted(file.name for file in folder.iterdir()))}")


def parser() -> argparse.ArgumentParser:
    parser = script_parser(__doc__, "export")
    add_model_option(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="the folder to write")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default="float32",
        metavar="NAME",
        help="type of the weights: float32, float16 (half the size) or bfloat16 (default: float32)",
    )
    parser.add_argument(
        "--license", metavar="NAME", help="licence of the weights, such as cc-by-4.0; the card names it"
    )
    parser.add_argument(
        "--notes", type=Path, metavar="FILE.md", help="Markdown sections that replace those of the card, or follow them"
    )
    parser.add_argument("--onnx", action="store_true", help="also write ONNX graphs, for scripts/caption_onnx.py")
    add_import_option(parser)
    return parser


def _read_notes(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"--notes {path}: cannot be read as text ({one_line(error)})") from error
