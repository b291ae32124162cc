#!/usr/bin/env python
"""Write a checkpoint whose weights are the mean of several, such as those of a first and a second stage.

A second stage learns a small data set's images by heart while it gains; half-way back to where it began, the model is
better than before and after (docs/self-critical.md). Checkpoints of runs that began with random
weights of their own have no such mean: caption with them together, as an ensemble.

The result captions, is scored and exported like any checkpoint, and a further run can begin with it (--init_from).

examples:
  python scripts/average_checkpoints.py runs/soft/checkpoints/best.ckpt runs/self_critical/checkpoints/best.ckpt \\
      --output runs/averaged/checkpoints/best.ckpt
  python scripts/average_checkpoints.py first.ckpt second.ckpt --shares 0.3 0.7 --output averaged.ckpt
"""

from __future__ import annotations

from pathlib import Path

from captioning.cli.arguments import add_import_option, script_parser
from captioning.errors import exits_on_input_error
from captioning.files import refuse_inputs, replacing


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="FILE.ckpt", help="two or more")
    parser.add_argument("--shares", nargs="+", type=float, metavar="SHARE", help="of each in the mean (default: equal)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.ckpt", help="the checkpoint to write")
    add_import_option(parser)
    arguments = parser.parse_args(argv)

    import torch

    from captioning.captioner.average import average_checkpoints
    from captioning.component import import_modules

    refuse_inputs(arguments.output, arguments.checkpoints, "--output")
    import_modules(arguments.imports, [Path()])
    checkpoint = average_checkpoints(arguments.checkpoints, arguments.shares)
    with replacing(arguments.output, "--output") as part:
        torch.save(checkpoint, part)
    averaged = checkpoint["captioning"]["settings"]["averaged"]
    shares = ", ".join(f"{each['share']:.3g} of {each['checkpoint']}" for each in averaged)
    print(f"written to {arguments.output}: {shares}")


if __name__ == "__main__":
    main()
