"""Compare runs: scores on the same images with intervals and tests, curves, speed, attention.

A RUN is a run's folder, or a folder of run folders. All runs are compared with the first. Runs that
differ only in their seed are one variant. The command prints tables and writes a page. It compares
the captions that `captioning test` wrote; --test first writes those that are missing.

examples:
  captioning compare runs/shapes_soft runs/shapes_hard
  captioning compare runs/soft_1 runs/soft_2 runs/hard_1 runs/hard_2 --metric bleu1
  captioning compare runs/soft_hard --test
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captioning.cli.arguments import (
    add_import_option,
    add_json_option,
    script_parser,
    text_beside,
    whole_number,
    write_result,
)
from captioning.cli.outputs import STDOUT, OutputFile
from captioning.cli.usage import check_tool, footnotes
from captioning.errors import InputError, exits_on_input_error

if TYPE_CHECKING:
    from captioning.comparison.runs import Run


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    check_tool("compare", imports=args.imports)
    with text_beside(args.json), footnotes():
        numbers = _compare(args, argv)
    write_result(args.json, numbers)


def _compare(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Print the comparison, write its page, and return its numbers."""
    from captioning.comparison.attention_explorer import explore, load_models
    from captioning.comparison.compare import compare
    from captioning.comparison.page import comparison_page
    from captioning.comparison.runs import common_folder, find_runs, name_runs
    from captioning.comparison.terminal import print_comparison
    from captioning.component import import_modules
    from captioning.files import write_text
    from captioning.provenance import provenance

    import_modules(args.imports, [Path()])
    runs: list[Run] = []
    for name in args.runs:
        folders = [run.folder.resolve() for run in runs if run.folder is not None]
        for run in find_runs(name):
            folder = None if run.folder is None else run.folder.resolve()
            # A run that was named by itself, to compare with, is not added again with the other runs of its folder.
            if folder is None or folder == Path(name).resolve() or folder not in folders:
                runs.append(run)
    if len(runs) < 2:
        raise InputError(f"give two or more runs to compare, got {' '.join(args.runs)}")
    name_runs(runs)
    if args.test:
        test_untested(runs, args.imports)
    models, problems = load_models(runs)
    comparison = compare(
        runs, metric=args.metric, resamples=args.resamples, seed=args.seed, images=args.images, java=True
    )
    explorer, more = explore(runs, models, comparison, seed=args.seed)
    comparison.notices += problems + more
    print_comparison(comparison)

    command = f"captioning compare {shlex.join(argv)}"
    origin = provenance(command=command, seed=args.seed)
    version = (origin["commit"] or "unknown") + ", changed since" * origin["uncommitted_changes"]
    footer = [command, f"Version {version}; {origin['date']}; {args.resamples} resamples from seed {args.seed}."]
    page = comparison_page(comparison, explorer=explorer, footer=footer)
    output = args.output or common_folder(runs) / "comparison.html"
    write_text(output, page, "--output", follow=args.output is not None)
    print(f"\npage          {output}")
    if args.json not in (None, STDOUT):
        print(f"numbers       {args.json}")
    return comparison.to_dict() | {"provenance": origin}


def test_untested(runs: list[Run], imports: list[str]) -> None:
    """Test every run that has a checkpoint and no captions.

    Raises:
        InputError: A test failed. The captions made so far are kept.
    """
    import subprocess

    from captioning.comparison.runs import add_test

    for run in runs:
        if run.captions is None and run.checkpoint is not None and run.folder is not None:
            options = ["--ckpt_path", str(run.checkpoint), *(f"--import={module}" for module in imports)]
            if subprocess.run([sys.executable, "-m", "captioning", "test", *options], check=False).returncode:
                raise InputError(f"{run.name}: captioning test failed")
            add_test(run, run.folder)


def parser() -> argparse.ArgumentParser:
    parser = script_parser(__doc__, "compare")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run, or a folder of runs")
    parser.add_argument(
        "--test", action="store_true", help="first score the best checkpoint of every run without captions"
    )
    parser.add_argument(
        "--metric",
        choices=("bleu1", "bleu2", "bleu3", "bleu4", "rouge_l", "cider_d", "meteor"),
        default="bleu4",
        metavar="NAME",
        help="metric of the verdict: bleu1 .. bleu4, rouge_l, cider_d or meteor (default: %(default)s)",
    )
    parser.add_argument(
        "--images",
        type=whole_number(0, 10_000),
        default=12,
        metavar="N",
        help="number of images to show, those that differ most (default: %(default)s)",
    )
    parser.add_argument(
        "--resamples",
        type=whole_number(1, 1_000_000),
        default=1000,
        metavar="N",
        help="number of resamples for intervals and tests (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, 2**63 - 1),
        default=0,
        metavar="N",
        help="seed of the resampling (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=OutputFile("HTML"),
        metavar="FILE.html",
        help="the page (default: comparison.html beside the runs)",
    )
    add_json_option(parser, "the numbers")
    add_import_option(parser)
    return parser
