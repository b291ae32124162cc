#!/usr/bin/env python
"""Measure the speed of this project against the common port and against the machine's limit.

Every number is a median, with quartiles, over rounds in which all subjects of a comparison take turns in one process.
The *common port* is a decoder of our own writing that does what the most used PyTorch implementation does. The *limit*
is the same work's matrix products and the score's tanh at this machine's measured peak plus the memory traffic that
cannot be avoided at its measured bandwidth. docs/performance.md explains the numbers.

examples:
  python scripts/benchmark.py --json benchmark.json
  python scripts/benchmark.py --only train decode --device cuda
  python scripts/benchmark.py --quick
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from captioning.cli.arguments import script_parser
from captioning.errors import InputError, exits_on_input_error

if TYPE_CHECKING:
    from benchmarks.report import Report

PARTS = {
    "train": "training steps",
    "decode": "captions from cached features in batches: greedy, beam 3, beam 5",
    "alone": "the same, one image at a time",
    "output": "training steps and beam 5 of mixtures over locations and of a transformer, beside soft attention's",
    "rows": "training steps with two rows per caption, beside one",
    "score": "the additive score's kernels beside those of an earlier version, named by --earlier",
    "encode": "encoders",
    "caption": "JPEG files to captions",
    "evaluate": "scores of a file of captions, as many as COCO's validation split has",
    "load": "loaders, and the share of a training step that waits for one",
    "index": "reading captions of COCO's size, with peak memory",
    "memory": "peak memory of a training step",
    "processes": "gradients, scores and random numbers of 2 and 3 processes beside those of one",
    "startup": "captioning --help, and caption_image.py of one image beside `import torch`",
    "epoch": "an epoch of COCO's size, simulated: tokens/s, waiting, memory over time; on a GPU unless named",
}


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    arguments = _parse(argv)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks/ is no part of the installed package

    import torch
    from rich.console import Console

    from benchmarks.report import Report
    from captioning.files import write_json
    from captioning.provenance import provenance

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device; use cpu")
    device = torch.device(arguments.device)
    asked_for = {"epoch": device.type == "cuda", "score": arguments.earlier is not None}
    names = arguments.only or [name for name in PARTS if asked_for.get(name, True)]
    if "score" in names and arguments.earlier is None:
        raise InputError("score: needs --earlier, the folder of a checkout of an earlier version")
    report = Report()
    with tempfile.TemporaryDirectory(prefix="captioning-benchmark-") as folder:
        for name in names:
            print(f"{name}: {PARTS[name]} ...", file=sys.stderr, flush=True)
            measure = _part(name, device, arguments, Path(folder))
            report.extend(measure())
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in report.tables():
        console.print(table)
    if arguments.json is not None:
        origin = provenance(command=_command(argv), seed=None)
        settings = {"device": str(device), "threads": torch.get_num_threads(), "rounds": arguments.rounds}
        write_json(arguments.json, report.to_dict() | {"settings": settings, "provenance": origin})


def _part(name: str, device: object, arguments: argparse.Namespace, folder: Path) -> Callable[[], Report]:
    """Return what measures one of ``PARTS``."""
    from benchmarks import (
        coco,
        decoding,
        epoch,
        evaluation,
        images,
        loading,
        memory,
        outputs,
        processes,
        rows,
        score,
        startup,
        training,
    )

    quick, rounds = arguments.quick, arguments.rounds
    return {
        "train": lambda: training.measure(device, quick=quick, rounds=rounds),
        "decode": lambda: decoding.measure(device, quick=quick, rounds=rounds),
        "alone": lambda: decoding.measure_alone(device, quick=quick, rounds=rounds),
        "output": lambda: outputs.measure(device, quick=quick, rounds=rounds),
        "rows": lambda: rows.measure(device, quick=quick, rounds=rounds),
        "score": lambda: score.measure(earlier=arguments.earlier, quick=quick, rounds=rounds),
        "encode": lambda: images.encode(device, quick=quick, rounds=rounds),
        "caption": lambda: images.caption(device, quick=quick, rounds=rounds, folder=folder),
        "evaluate": lambda: evaluation.measure(quick=quick, rounds=rounds, folder=folder),
        "load": lambda: loading.measure(device, quick=quick, rounds=rounds, folder=folder),
        "index": lambda: coco.measure(quick=quick, rounds=rounds, folder=folder),
        "memory": lambda: memory.measure(device, quick=quick),
        "processes": lambda: processes.measure(quick=quick, folder=folder),
        "startup": lambda: startup.measure(quick=quick, rounds=rounds, folder=folder),
        "epoch": lambda: epoch.measure(device, quick=quick, rounds=rounds, folder=folder),
    }[name]


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__)
    parts = "; ".join(f"{name}: {what}" for name, what in PARTS.items())
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"measure only these. {parts}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write ratios, seconds and provenance")
    parser.add_argument("--earlier", type=Path, metavar="FOLDER", help="checkout that `score` compares with")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    parser.add_argument("--rounds", type=int, help="rounds of measurement (default: 7; with --quick: 2)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, the numbers say nothing")
    arguments = parser.parse_args(argv)
    if arguments.rounds is None:
        arguments.rounds = 2 if arguments.quick else 7
    if arguments.rounds < 1:
        raise InputError(f"--rounds must be at least 1, got {arguments.rounds}")
    return arguments


def _command(argv: list[str] | None) -> str:
    return " ".join(["python scripts/benchmark.py", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    main()
