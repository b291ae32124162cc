"""A finished or running training run as plain data, read from the folder that ``captioning fit`` writes."""

from __future__ import annotations

import csv
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from captioning.errors import InputError, one_line
from captioning.evaluation.records import CaptionedImage, read_captions, read_metrics
from captioning.files import read_config
from captioning.run_folder import RunFolder

Curve = list[tuple[int, float]]

_SIGNS = ("config.yaml", "metrics", "checkpoints", "test_metrics.json")  # any of them makes a folder a run
_SUMMED_OUTPUTS = ("SummedOutput", "MarginalOutput")  # today, and in runs of earlier versions


@dataclass
class Run:
    """One run. What is unknown is empty or None.

    Attributes:
        name: Name in tables, unique among the compared runs.
        folder: RUNS/NAME.
        settings: The full configuration, nested.
        curves: By log key, (optimizer step, value) in the order of the steps.
        scores: Metrics of the test split, without their prefix ("bleu4": percent).
        search: Decoding options of the test, such as beam_size and inference.
        captions: By image id; None if the run was not tested.
        checkpoint: The checkpoint that was tested, else the best.
        parameters: Numbers of parameters of "encoder" and "decoder".
    """

    name: str
    folder: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)
    captions: dict[int, CaptionedImage] | None = None
    checkpoint: Path | None = None
    parameters: dict[str, int] = field(default_factory=dict)

    @property
    def captions_per_second(self) -> float | None:
        """The median of the logged speeds of training, per process."""
        values = [value for _, value in self.curves.get("train/captions_per_second", [])]
        return statistics.median_high(values) if values else None

    @property
    def is_summed(self) -> bool:
        """Whether the likelihood of a word is summed over all locations."""
        return flat(self.settings).get("model.decoder.output") in _SUMMED_OUTPUTS


def is_run_folder(folder: Path) -> bool:
    return any((folder / name).exists() for name in _SIGNS)


def find_runs(folder: str | Path) -> list[Run]:
    """Read the run of a folder or, if it is none, all runs in it, by name.

    Raises:
        InputError: There is no run, or one cannot be read.
    """
    path = Path(folder)
    if not path.is_dir():
        raise InputError(f"{folder}: no such folder; give a run's folder, or a folder of runs")
    inside = [] if is_run_folder(path) else sorted(child for child in path.iterdir() if is_run_folder(child))
    return [read_run(child) for child in inside or [path]]


def read_run(folder: Path) -> Run:
    """Read RUNS/NAME: config.yaml, metrics/, and what `captioning test` left.

    Raises:
        InputError: The folder is not a run, or a file in it is damaged.
    """
    if not is_run_folder(folder):
        raise InputError(f"{folder}: not a run; it has none of {', '.join(_SIGNS)}")
    layout = RunFolder(folder)
    best = layout.checkpoint("best")
    run = Run(folder.resolve().name, folder, checkpoint=best if best.is_file() else None)
    if layout.config.is_file():
        run.settings = read_config(layout.config)
    points: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("metrics/*/metrics.csv"), key=_version):
        for key, step, value in _logged(path):
            points.setdefault(key, {})[step] = value  # of a step that a resumed run logged twice, the later value
    run.curves = {key: sorted(curve.items()) for key, curve in points.items()}
    add_test(run, folder)
    return run


def add_test(run: Run, folder: Path) -> None:
    """Add to ``run`` what `captioning test` left in its folder."""
    scores, captions = folder / "test_metrics.json", folder / "test_captions.json"
    if scores.is_file():
        run.scores, run.search = read_metrics(scores)
        tested = RunFolder(folder).checkpoints / Path(str(run.search.get("checkpoint"))).name
        run.checkpoint = tested if tested.is_file() else run.checkpoint
    if captions.is_file():
        run.captions = read_captions(captions) or None


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as {"model.decoder.dropout": 0.5}; "model.decoder.attention" has the class's short name.

    Components of a list, such as callbacks, are keyed by their class, not by their position.
    """
    return dict(_flat("", settings))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
        yield prefix, value["class_path"].rpartition(".")[2]
        arguments = value.get("init_args") or {}
        yield from _flat(prefix, arguments) if arguments else ()
    elif isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        names: Counter[str] = Counter()
        for number, item in enumerate(value):
            path = item.get("class_path") if isinstance(item, Mapping) else None
            name = path.rpartition(".")[2] if isinstance(path, str) else str(number)
            names[name] += 1
            yield from _flat(f"{prefix}.{name}" + f"-{names[name]}" * (names[name] > 1), item)
    else:
        yield prefix, value


def _logged(path: Path) -> Iterator[tuple[str, int, float]]:
    """Yield the key, the optimizer step and the value of every finite number of a metrics.csv."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                step = row.pop("step", None)
                if not step:
                    continue  # the last line of a killed run may be cut short
                for key, text in row.items():
                    if text and math.isfinite(value := float(text)):
                        yield key, int(float(step)), value
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read ({one_line(error)}); mend it or move it away") from error


def _version(path: Path) -> int:
    """Of metrics/version_N/metrics.csv, which a resumed run continues in the next one."""
    digits = path.parent.name.rpartition("_")[2]
    return int(digits) if digits.isdigit() else -1


def name_runs(runs: Sequence[Run]) -> None:
    """Give runs of one name the folder above it too, and a number where that is the same as well."""
    for longer in (True, False):
        counts = Counter(run.name for run in runs)
        seen: Counter[str] = Counter()
        for run in runs:
            name = run.name
            seen[name] += 1
            if counts[name] > 1 and longer and run.folder is not None:
                run.name = f"{run.folder.resolve().parent.name}/{name}"
            elif counts[name] > 1 and not longer:
                run.name = f"{name} ({seen[name]})"


def common_folder(runs: Sequence[Run]) -> Path:
    """Return the folder that all runs' folders lie in; the working directory if no run has one."""
    parents = [run.folder.resolve().parent for run in runs if run.folder is not None]
    return Path(os.path.relpath(os.path.commonpath(parents))) if parents else Path()
