"""The command ``compare``: runs side by side."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from captioning.cli import IMPORTED_MODULES, json_output, print_written
from captioning.errors import InputError, check_choice, check_whole
from captioning.files import FIGURE_SUFFIXES, JSON_SUFFIXES, PAGE_SUFFIXES, check_output, write_text
from captioning.provenance import provenance

if TYPE_CHECKING:
    from captioning.comparison.runs import Run


def compare(
    *runs: str,
    test: bool = False,
    metric: str = "bleu4",
    images: int = 12,
    resamples: int = 1000,
    seed: int = 0,
    figure: Path | None = None,
    output: Path | None = None,
    json: Path | None = None,
) -> None:
    """Compare runs: metrics on the same images with intervals and tests, curves, speed, attention.

    The captions come from `captioning test`. All runs are compared with the first. Runs that differ only
    in their seed are one variant. The command prints tables and writes a page.

    Args:
        *runs: The folder of a run, or a folder of runs.
        test: First test every run that has no captions, or captions of other weights. The checkpoint is the one that
            was tested before, or else the best.
        metric: Metric of the verdict, such as bleu4, rouge_l, cider_d or meteor.
        images: Number of images to show, most different first.
        resamples: Number of resamples for intervals and tests.
        seed: Seed of the resampling.
        figure: Draw where one run of each variant looks at the words of one caption: a png, pdf or svg file.
        output: The page, an HTML file; by default comparison.html beside the first run.
        json: Also write the numbers as JSON; - prints only them.

    Examples:
        captioning compare runs/shapes_soft runs/shapes_hard
        captioning compare runs/soft_1 runs/soft_2 runs/hard_1 runs/hard_2 --metric bleu1
    """
    if missing := next((run for run in runs if not Path(run).is_dir()), None):
        raise InputError(f"{missing}: no such folder of a run")
    files = ("--figure", figure, FIGURE_SUFFIXES), ("--output", output, PAGE_SUFFIXES), ("--json", json, JSON_SUFFIXES)
    for option, path, suffixes in files:
        check_output(path, option, suffixes)
    check_whole(1, resamples=resamples)
    check_whole(0, seed=seed, images=images)
    from captioning.metrics.table import CAPTION_METRICS

    check_choice(CAPTION_METRICS, **{"--metric": metric})
    from captioning.comparison.attention_explorer import explore_disagreements, load_models_into, reference_caption
    from captioning.comparison.compare import compare_runs
    from captioning.comparison.page import comparison_page
    from captioning.comparison.runs import INPUTS, find_runs, name_runs
    from captioning.comparison.terminal import print_comparison

    with json_output(json) as results:
        # A run counts once, even if it is named by its folder and by the folder of runs.
        all_runs = list({os.path.realpath(run.folder): run for name in runs for run in find_runs(name)}.values())
        if len(all_runs) < 2:
            raise InputError(f"give two or more different runs to compare, got {' '.join(map(str, runs))}")
        inputs = [path for run in all_runs for pattern in INPUTS for path in run.folder.glob(pattern)]
        for option, path, _ in files:
            check_output(path, option, inputs=inputs)
        page = output or Path(os.path.relpath(all_runs[0].folder / "../comparison.html"))
        if test:
            all_runs = [_test_if_needed(run) for run in all_runs]
        name_runs(all_runs)
        captioners, problems = load_models_into(all_runs)  # before the comparison, which shows parameters and settings
        comparison = compare_runs(all_runs, metric=metric, resamples=resamples, seed=seed, images=images)
        explorer, missing_attention = explore_disagreements(all_runs, captioners, comparison, seed=seed)
        comparison.notices += problems + missing_attention
        first_seeds = {names[0] for names in comparison.variant_runs}
        reference = reference_caption([run for run in all_runs if run.name in first_seeds], captioners)
        if figure is not None:
            if reference is None:
                raise InputError(f"--figure {figure}: no common image of the runs has its file and models")
            reference.save_figure(figure)
            print_written(figure)
        print_comparison(comparison)
        command = f"captioning compare {shlex.join(map(str, runs))} --metric {metric}"
        record = provenance(command=command, seed=seed)
        version = (record["commit"] or "unknown") + (", changed since" if record["uncommitted_changes"] else "")
        footer = [command, f"Version {version}; {record['date']}; {resamples} resamples from seed {seed}."]
        write_text(page, comparison_page(comparison, explorer=explorer, reference=reference, footer=footer), "--output")
        print(f"\npage          {page}")
        results |= comparison.to_dict() | {"provenance": record}


def _test_if_needed(run: Run) -> Run:
    """Return a run. If it has no captions, first test its checkpoint, without the output of the test."""
    from captioning.comparison.runs import read_run

    if run.captions is not None or run.checkpoint is None:
        return run
    print(f"testing {run.name} ...", file=sys.stderr, flush=True)
    options = ["--ckpt_path", str(run.checkpoint), *(f"--import={module}" for module in IMPORTED_MODULES)]
    command = [sys.executable, "-m", "captioning", "test", *options]
    if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
        raise InputError(f"{run.name}: captioning test failed")
    return read_run(run.folder)
