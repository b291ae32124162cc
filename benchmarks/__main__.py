"""Compare the speed of this project with the common port's.

Every number is a median with quartiles over rounds in which all subjects take turns. The common
port works as the most used PyTorch implementation does (docs/performance.md).

subjects:
  train     training steps: soft, hard, two samples, the summed likelihood, the transformer
  guidance  training steps of soft attention that is taught where to look, beside untaught soft attention
  decode    captions from cached features in batches: greedy, beam 3, beam 5
  alone     the same, one image at a time
  kernels   kernels beside their plain formulas, forward and backward

examples:
  python -m benchmarks --json benchmark.json
  python -m benchmarks --only train decode --device cuda
  python -m benchmarks --quick
"""

import argparse
import shlex
import sys
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import agreement, decoding, kernels, training
from benchmarks.report import Report
from benchmarks.timing import Setup
from captioning.errors import InputError, exits_on_input_error
from captioning.files import write_json
from captioning.provenance import provenance

SUBJECTS = {
    "train": training.measure,
    "guidance": training.measure_guidance,
    "decode": decoding.measure,
    "alone": decoding.measure_alone,
    "kernels": kernels.measure,
}


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, metavar="SUBJECT", help="measure only these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write ratios and seconds")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default: cpu)")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of measurement (default: 7; with --quick: 2)")
    parser.add_argument(
        "--quick", action="store_true", help="use tiny sizes, to see that it runs; the numbers mean nothing"
    )
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device; use cpu")
    rounds = args.rounds or (2 if args.quick else 7)
    names = args.only or list(SUBJECTS)
    agreement.check(torch.device(args.device))
    report = Report()
    setup = Setup(torch.device(args.device), args.quick, rounds)
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        report.extend(SUBJECTS[name](setup))
    Console(width=None if sys.stdout.isatty() else 160).print(report.table())
    if args.json is not None:
        origin = provenance(command=f"python -m benchmarks {shlex.join(argv)}", seed=None)
        settings = {"device": args.device, "threads": torch.get_num_threads(), "rounds": rounds}
        write_json(args.json, report.to_dict() | {"settings": settings, "provenance": origin})


if __name__ == "__main__":
    main()
