"""A finished or running training run as plain data, read from the folder that ``captioning fit`` writes."""

from __future__ import annotations

import csv
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from captioning.cells import CellGrid
from captioning.errors import InputError, one_line
from captioning.evaluation.records import CaptionedImage, read_captions, read_cells, read_metrics
from captioning.files import regular
from captioning.run_folder import RunFolder
from captioning.settings import read_config

Curve = list[tuple[int, float]]

_SIGNS = ("config.yaml", "metrics", "checkpoints", "test_metrics.json")  # any of them makes a folder a run


@dataclass(frozen=True)
class WandbPlace:
    """The address of a run in wandb, and its local folders if it was logged offline."""

    entity: str
    project: str
    run_id: str
    offline: tuple[Path, ...] = ()


@dataclass
class Run:
    """One run. What is unknown is empty or None.

    Attributes:
        name: Name in tables, unique among the compared runs.
        source: The folder or address that was given.
        folder: RUNS/NAME, if it is on this machine.
        settings: The full configuration, nested.
        curves: By log key, (optimizer step, value) in the order of the steps.
        scores: Scores of the test split, without their prefix ("bleu4": percent).
        search: Decoding options of the test, such as beam_size and inference.
        captions: By image id; None if the run was not tested.
        cells: The grid that pointing was scored on, if it was.
        checkpoint: The checkpoint that was tested, else the best.
        parameters: Numbers of parameters of "encoder" and "decoder".
        seconds: Wall-clock time of training.
        wandb: Where wandb has the run.
        how_to_test: The command that makes ``captions``.
    """

    name: str
    source: str
    folder: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)
    captions: dict[int, CaptionedImage] | None = None
    cells: CellGrid | None = None
    checkpoint: Path | None = None
    parameters: dict[str, int] | None = None
    seconds: float | None = None
    wandb: WandbPlace | None = None
    how_to_test: str = ""

    @property
    def captions_per_second(self) -> float | None:
        """The median of the logged speeds of training, per process."""
        values = sorted(value for _, value in self.curves.get("train/captions_per_second", []))
        return values[len(values) // 2] if values else None

    def over_training(self, key: str, parts: int) -> list[float | None]:
        """Return the means of a logged number in equal parts of the training; None where none was logged."""
        last = max((step for curve in self.curves.values() for step, _ in curve), default=0) + 1
        values: list[list[float]] = [[] for _ in range(parts)]
        for step, value in self.curves.get(key, []):
            if step >= 0:
                values[step * parts // last].append(value)
        return [statistics.fmean(part) if part else None for part in values]


def is_run_folder(folder: Path) -> bool:
    return any((folder / name).exists() for name in _SIGNS)


def read_run(folder: Path) -> Run:
    """Read RUNS/NAME: config.yaml, metrics/, the results of `captioning test` and the best checkpoint's settings.

    Raises:
        InputError: The folder is not a run, or a file in it is damaged.
    """
    if not is_run_folder(folder):
        raise InputError(f"{folder}: not a run; it has none of {', '.join(_SIGNS)}")
    layout = RunFolder(folder)
    best = layout.checkpoint("best")
    run = Run(folder.resolve().name, str(folder), folder, checkpoint=best if best.is_file() else None)
    if layout.config.is_file():
        run.settings = read_config(layout.config)
    for path in sorted(folder.glob("metrics/*/metrics.csv"), key=_version):
        for key, points in _read_csv(path).items():
            run.curves.setdefault(key, []).extend(points)
    run.curves = {key: merged(points) for key, points in run.curves.items()}
    add_test(run, folder)
    return run


def add_test(run: Run, folder: Path) -> None:
    """Add to ``run`` what `captioning test` left in its folder, or the command that leaves it there."""
    scores, captions = folder / "test_metrics.json", folder / "test_captions.json"
    if scores.is_file():
        run.scores, run.search = read_metrics(scores)
        run.cells = read_cells(scores)
        tested = RunFolder(folder).checkpoints / Path(str(run.search.get("checkpoint"))).name
        run.checkpoint = tested if tested.is_file() else run.checkpoint
    if captions.is_file():
        run.captions = read_captions(captions) or None
    if run.captions is None and run.checkpoint is not None:
        # Without its config.yaml only `captioning evaluate` finds the settings, in the checkpoint.
        with_config = RunFolder(folder).config.is_file()
        command = "captioning test --ckpt_path" if with_config else "captioning evaluate --model"
        run.how_to_test = f"{command} {run.checkpoint}"


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


def classes(settings: Any) -> Iterator[str]:
    """Yield the paths of classes in settings that are neither of this package nor of its libraries.

    Two of them may have one short name. A class of this package has several paths.
    """
    if isinstance(settings, Mapping):
        path = str(settings.get("class_path", "captioning."))
        if not path.startswith(("captioning.", "torch.", "pytorch_lightning.")):
            yield path
        settings = list(settings.values())
    for value in settings if isinstance(settings, list) else ():
        yield from classes(value)


def merged(points: Curve) -> Curve:
    """Return the points in the order of their steps; of a step that a resumed run logged twice, the later value."""
    return sorted(dict(points).items())


def _read_csv(path: Path) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    try:
        with open(path, newline="", encoding="utf-8", opener=regular) as file:
            for row in csv.DictReader(file):
                try:
                    step = int(float(row.pop("step", None) or "nan"))
                except (TypeError, ValueError, OverflowError):
                    continue  # the last line of a killed run may be cut short
                for key, text in row.items():
                    value = number(text)
                    if key is not None and value is not None:
                        curves.setdefault(key, []).append((step, value))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read ({one_line(error)}); mend it or move it away") from error
    return curves


def number(value: Any) -> float | None:
    """Return a finite number, None for anything else."""
    try:
        converted = float(value)
    except (TypeError, ValueError):
        return None
    return converted if math.isfinite(converted) and not isinstance(value, bool) else None


def _version(path: Path) -> int:
    """Of metrics/version_N/metrics.csv, which a resumed run continues in the next one."""
    digits = path.parent.name.rpartition("_")[2]
    return int(digits) if digits.isdigit() else -1


SUMMED = "summed"
"""What comparisons call a model with ``SummedOutput``, whatever its attention is called."""


def is_summed(run: Run) -> bool:
    """Return whether the likelihood of a word is summed over all locations."""
    return flat(run.settings).get("model.decoder.output") == "SummedOutput"


def name_runs(runs: Sequence[Run]) -> None:
    """Decide what the runs are called: by their folders' names, in which ``SUMMED`` stands for "marginal".

    Runs of one name get the folder above it too, and a number where that is the same as well.
    """
    for run in runs:
        if is_summed(run):
            run.name = re.sub(r"[_-]?(?<![a-z])marginal(?![a-z])[_-]?", f" {SUMMED} ", run.name).strip()
    for longer in (True, False):
        taken: dict[str, list[Run]] = {}
        for run in runs:
            taken.setdefault(run.name, []).append(run)
        for name, alike in taken.items():
            for count, run in enumerate(alike, 1):
                if len(alike) > 1 and longer and run.folder is not None:
                    run.name = f"{run.folder.resolve().parent.name}/{name}"
                elif len(alike) > 1 and not longer:
                    run.name = f"{name} ({count})"


def common_folder(runs: Sequence[Run]) -> Path:
    """Return the folder that all runs' folders lie in; the working directory if no run has one."""
    parents = [run.folder.resolve().parent for run in runs if run.folder is not None]
    return Path(os.path.relpath(os.path.commonpath(parents))) if parents else Path()
