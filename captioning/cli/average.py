"""Write a checkpoint whose weights are the mean of several, such as those of a first and a second stage.

A second stage improves a model but also memorises the images of a small data set. The mean of both stages is better
than either (docs/self-critical.md). Checkpoints of runs that began with different random weights have no useful mean:
caption with them as an ensemble.

The result captions and is scored and exported like any checkpoint, and another run can begin with it (--init_from).

examples:
  captioning average runs/soft/checkpoints/best.ckpt runs/self_critical/checkpoints/best.ckpt \\
      --output runs/averaged/checkpoints/best.ckpt
  captioning average first.ckpt second.ckpt --fractions 0.3 0.7 --output averaged.ckpt
"""

from __future__ import annotations

from pathlib import Path

from captioning.cli.arguments import add_import_option, script_parser
from captioning.cli.outputs import OutputFile
from captioning.errors import exits_on_input_error


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "average")
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="FILE.ckpt", help="two or more")
    parser.add_argument(
        "--fractions", nargs="+", type=float, metavar="F", help="of each checkpoint in the mean (default: equal)"
    )
    parser.add_argument(
        "--output", type=OutputFile("checkpoint"), required=True, metavar="FILE.ckpt", help="the checkpoint to write"
    )
    add_import_option(parser)
    arguments = parser.parse_args(argv)

    from captioning.checkpoint.average import average_checkpoints
    from captioning.checkpoint.io import write_checkpoint
    from captioning.component import import_modules

    import_modules(arguments.imports, [Path()])
    checkpoint = average_checkpoints(arguments.checkpoints, arguments.fractions)
    write_checkpoint(checkpoint, arguments.output)
    averaged = checkpoint["captioning"]["settings"]["averaged"]
    parts = ", ".join(f"{member['fraction']:.3g} of {member['checkpoint']}" for member in averaged)
    print(f"written to {arguments.output}: {parts}")
