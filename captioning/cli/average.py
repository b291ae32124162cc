"""Write a checkpoint whose weights are the mean of several, such as those of two stages of training.

Use the result like any checkpoint: to caption, to score, to export, or to start training from it
(--init_from). The mean is useful if one run started from the weights of the other, or all from the
same weights. For runs with random weights of their own, use an ensemble (docs/self-critical.md).

examples:
  captioning average --model runs/soft/checkpoints/best.ckpt \\
      --model runs/again/checkpoints/best.ckpt --output runs/averaged/checkpoints/best.ckpt
  captioning average --model first.ckpt --model second.ckpt --fractions 0.3 0.7 --output mean.ckpt
"""

from __future__ import annotations

import argparse
from pathlib import Path

from captioning.cli.arguments import add_import_option, script_parser
from captioning.cli.outputs import OutputFile
from captioning.cli.usage import check_tool, is_no_path
from captioning.errors import InputError, exits_on_input_error


def parser() -> argparse.ArgumentParser:
    parser = script_parser(__doc__, "average")
    parser.usage = "captioning average --model FILE.ckpt --model FILE.ckpt --output FILE.ckpt [options]"
    parser.add_argument(
        "--model",
        dest="models",
        required=True,
        action="append",
        metavar="FILE.ckpt",
        help="a checkpoint; repeat the option for each one",
    )
    parser.add_argument(
        "--fractions", nargs="+", type=float, metavar="F", help="weight of each checkpoint in the mean (default: equal)"
    )
    parser.add_argument(
        "--output", type=OutputFile("checkpoint"), required=True, metavar="FILE.ckpt", help="the checkpoint to write"
    )
    add_import_option(parser)
    return parser


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    for model in arguments.models:
        if is_no_path(model) or Path(model, "model.safetensors").exists():
            raise InputError(f"--model {model}: is an exported model; give the .ckpt file that it is from")
    check_tool("average", arguments.models, arguments.imports)
    checkpoints = [Path(model) for model in arguments.models]

    from captioning.checkpoint.average import average_checkpoints
    from captioning.checkpoint.io import write_checkpoint
    from captioning.component import import_modules

    import_modules(arguments.imports, [Path()])
    checkpoint = average_checkpoints(checkpoints, arguments.fractions)
    write_checkpoint(checkpoint, arguments.output)
    averaged = checkpoint["captioning"]["settings"]["averaged"]
    parts = ", ".join(f"{member['fraction']:.3g} of {member['checkpoint']}" for member in averaged)
    print(f"written to {arguments.output}: {parts}")
