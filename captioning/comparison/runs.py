"""A finished or running training run as plain data, read from the folder that ``captioning fit`` writes."""

import csv
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from captioning.errors import InputError, one_line
from captioning.evaluation.caption_files import CaptionedImage, read_captions, read_metrics
from captioning.run_folder import RunFolder, is_current
from captioning.settings import read_config
from captioning.trace import CONTEXT_MODES

Curve = list[tuple[int, float]]

_SIGNS = ("config.yaml", "metrics", "checkpoints", "test_metrics.json")  # any of them makes a folder a run

INPUTS = ("config.yaml", "metrics/*/metrics.csv", "test_*.json", "*/test_metrics.json", "checkpoints/*")
"""The files of a run's folder that a comparison reads, as patterns."""


@dataclass
class Run:
    """One run. Fields are empty or None if their files are missing."""

    name: str  # in tables, unique among the compared runs
    folder: Path = Path()  # RUNS/NAME
    settings: dict[str, Any] = field(default_factory=dict)  # the full configuration, nested
    curves: dict[str, Curve] = field(default_factory=dict)  # by log key, (optimizer step, value) in order
    metrics: dict[str, float] = field(default_factory=dict)  # of the test, without prefix ("bleu4": percent)
    conditions: dict[str, Any] = field(default_factory=dict)  # of the test: split, checkpoint, beam_size and others
    captions: dict[int, CaptionedImage] | None = None  # by image id; None if there are none
    metrics_by_context: dict[str, dict[str, float]] = field(default_factory=dict)  # of the tests of each context mode
    checkpoint: Path | None = None  # the tested one, else the best
    is_outdated: bool = False  # whether the checkpoint's weights have changed since the test, which is then left out
    parameters: dict[str, int] = field(default_factory=dict)  # numbers of parameters of "encoder" and "decoder"

    @property
    def captions_per_second(self) -> float | None:
        """The median of the logged speeds of training, per process."""
        values = [value for _, value in self.curves.get("train/captions_per_second", [])]
        return statistics.median_high(values) if values else None

    @property
    def never_drew(self) -> bool:
        """Whether stochastic attention drew no location in training, as far as it was logged."""
        curve = self.curves.get("train/sample_probability", [])
        # Steps that were not logged may have drawn. REINFORCE then logs a reward.
        return bool(curve) and not any(value for _, value in curve) and "train/reward" not in self.curves


def is_run_folder(folder: Path) -> bool:
    return any((folder / name).exists() for name in _SIGNS)


def find_runs(folder: str | Path) -> list[Run]:
    """Return the run of a folder, or the runs in a folder of runs, sorted by name. Raises InputError without a run."""
    path = Path(folder)
    run_folders = [] if is_run_folder(path) else sorted(filter(is_run_folder, path.iterdir()))
    return [read_run(run_folder) for run_folder in run_folders or [path]]


def read_run(folder: Path) -> Run:
    """Read config.yaml, metrics/ and the test's files of RUNS/NAME. Raises InputError if a file is damaged."""
    if not is_run_folder(folder):
        raise InputError(f"{folder}: not a run; it has none of {', '.join(_SIGNS)}")
    layout, run = RunFolder(folder), Run(folder.resolve().name, folder)
    if layout.config.is_file():
        run.settings = read_config(layout.config)
    points: dict[str, dict[int, float]] = {}
    # A resumed run continues in version_N+1, and version_10 comes after version_9.
    for path in sorted(folder.glob("metrics/*/metrics.csv"), key=lambda path: (len(path.parent.name), path)):
        for key, step, value in _read_logged(path):
            points.setdefault(key, {})[step] = value  # the resumed run's value for a step that was logged twice
    run.curves = {key: sorted(curve.items()) for key, curve in points.items()}
    metrics_file, captions_file = folder / "test_metrics.json", folder / "test_captions.json"
    if metrics_file.is_file():
        run.metrics, run.conditions = read_metrics(metrics_file)
    tested_checkpoint = layout.checkpoints / Path(str(run.conditions.get("checkpoint"))).name
    run.checkpoint = next((path for path in (tested_checkpoint, layout.checkpoint("best")) if path.is_file()), None)
    for mode in CONTEXT_MODES:
        if (path := folder / mode / metrics_file.name).is_file():
            metrics, conditions = read_metrics(path)
            if is_current(conditions.get("weights", ""), run.checkpoint):
                run.metrics_by_context[mode] = metrics
    if not is_current(run.conditions.pop("weights", ""), run.checkpoint):
        run.metrics, run.conditions, run.is_outdated = {}, {}, True
    elif captions_file.is_file():
        run.captions = read_captions(captions_file) or None
    return run


def _read_logged(path: Path) -> Iterator[tuple[str, int, float]]:
    """Yield the key, the optimizer step and the value of every finite number of a metrics.csv."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            for row in csv.DictReader(file):
                step = row.pop("step", None)
                if not step:
                    continue  # the last line of a killed run may be cut short
                for key, text in row.items():
                    if text and math.isfinite(value := float(text)):
                        yield key, int(float(step)), value
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read ({one_line(error)}); mend it or move it away") from error


def name_runs(runs: Sequence[Run]) -> None:
    """Rename runs that share a name to their folders."""
    counts = Counter(run.name for run in runs)
    for run in runs:
        if counts[run.name] > 1:
            run.name = str(run.folder)
