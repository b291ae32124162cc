"""Write a checkpoint whose weights are the mean of several, such as those of two stages of training.

The result captions, is scored and exported like any checkpoint, and training can begin with it
(--init_from). Runs that began with different random weights have no useful mean: caption with an
ensemble of them (docs/self-critical.md).

examples:
  captioning average --model runs/soft/checkpoints/best.ckpt \\
      --model runs/again/checkpoints/best.ckpt --output runs/averaged/checkpoints/best.ckpt
  captioning average --model first.ckpt --model second.ckpt --fractions 0.3 0.7 --output mean.ckpt
"""

from __future__ import annotations

import argparse
from pathlib import Path

from captioning.cli.arguments import add_import_option, add_model_option, script_parser
from captioning.cli.outputs import OutputFile
from captioning.cli.usage import check_tool
from captioning.errors import exits_on_input_error


def parser() -> argparse.ArgumentParser:
    parser = script_parser(__doc__, "average")
    add_model_option(parser, several="one more of the mean")
    parser.add_argument(
        "--fractions", nargs="+", type=float, metavar="F", help="of each model in the mean (default: equal)"
    )
    parser.add_argument(
        "--output", type=OutputFile("checkpoint"), required=True, metavar="FILE.ckpt", help="the checkpoint to write"
    )
    add_import_option(parser)
    return parser


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
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
