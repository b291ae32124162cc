"""The measurements of a study in one JSON file: the scores of every run, and the tests between its variants.

    {"common": what all scores share, "scores": {"soft_1": .., "soft_1_beam5": ..}, "comparisons": {"shapes": ..}}

Every entry of ``scores`` is what ``captioning evaluate --json`` writes, without what is in ``common``. Its name
is VARIANT_SEED or VARIANT_SEED_EVALUATION, and it takes one line. "training" is added to it: the speed,
and the means of ``TRAINING_STATISTICS`` in each tenth of the training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from captioning.errors import InputError
from captioning.files import read_json, write_text

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

TRAINING_STATISTICS = {  # logged as train/.. -> what a study's table calls it
    "attention_entropy": "entropy of alpha (nats)",
    "support_size": "locations in the support",
    "beta": "beta",
    "reward": "return",
    "baseline": "baseline",
    "advantage_std": "deviation of the advantage",
}
TENTHS = 10

Scores = dict[str, Any]
"""What was measured of one run: "values" in percent, their "unit", and where they come from."""


def score_name(variant: str, seed: int, evaluation: str = "") -> str:
    """Return the name of a run's score in the file of measurements, or that of a further evaluation."""
    return f"{variant}_{seed}" + (f"_{evaluation}" if evaluation else "")


def read_scores(path: Path) -> dict[str, Scores]:
    """Return the scores of a study's file by name; none if there is no file yet.

    Raises:
        InputError: The file is damaged.
    """
    return _scores_of(_read(path), path)


def read_comparison(path: Path, study: str) -> dict[str, Any]:
    """Return what ``write_comparison`` wrote last, {} if nothing.

    Raises:
        InputError: The file is damaged.
    """
    comparisons = _read(path).get("comparisons", {})
    return dict(comparisons.get(study, {}))


def add_scores(path: Path, name: str, scores: Scores) -> None:
    """Add the scores of one run, or replace them. Several processes may do so at once.

    Raises:
        InputError: The file is damaged or cannot be written.
    """

    def add(content: dict[str, Any]) -> None:
        common, reduced = factor(_scores_of(content, path) | {name: scores})
        content |= {"common": common, "scores": reduced}

    _update(path, add)


def write_comparison(path: Path, study: str, comparison: Mapping[str, Any]) -> None:
    """Write the tests of a study beside the scores.

    Raises:
        InputError: The file is damaged or cannot be written.
    """
    _update(path, lambda content: content.setdefault("comparisons", {}).update({study: comparison}))


def factor(scores: Mapping[str, Scores]) -> tuple[Scores, dict[str, Scores]]:
    """Return what all scores have in common, and each without it. ``expand`` is the inverse."""
    if len(scores) < 2:
        return {}, dict(scores)
    common = _common(list(scores.values()))
    return common, {name: _without(entry, common) for name, entry in scores.items()}


def expand(common: Mapping[str, Any], reduced: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings from their common part and the rest."""
    merged = dict(common)
    for key, value in reduced.items():
        inner = common.get(key)
        merged[key] = expand(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _common(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first, *others = entries
    common = {}
    for key, value in first.items():
        values = [entry.get(key, ...) for entry in others]
        if all(isinstance(inner, dict) and inner for inner in (value, *values)):
            if inner := _common([value, *values]):
                common[key] = inner
        elif all(type(inner) is type(value) and inner == value for inner in values):
            common[key] = value
    return common


def _without(entry: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    reduced = {}
    for key, value in entry.items():
        if key not in common:
            reduced[key] = value
        elif isinstance(value, dict) and (rest := _without(value, common[key])):
            reduced[key] = rest
    return reduced


def _scores_of(content: Mapping[str, Any], path: Path) -> dict[str, Scores]:
    common, scores = content.get("common", {}), content.get("scores", {})
    if not isinstance(common, dict) or not isinstance(scores, dict):
        raise InputError(f"{path}: its common part or its scores are no mapping")
    expanded = {name: expand(common, entry) if isinstance(entry, dict) else {} for name, entry in scores.items()}
    for name, entry in expanded.items():
        values = entry.get("values")
        bleu4 = values.get("bleu4") if isinstance(values, dict) else None
        if not isinstance(bleu4, (int, float)):
            problem = "not what captioning evaluate --json writes; delete it to score the run again"
            raise InputError(f"{path}: scores.{name}: {problem}")
    return expanded


def _read(path: Path) -> dict[str, Any]:
    content = read_json(path) if path.exists() else {}
    if not isinstance(content, dict) or not isinstance(content.get("comparisons", {}), dict):
        raise InputError(f"{path}: not the measurements of a study")
    return content


def _update(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    with _locked(path.parent):
        content = _read(path)
        change(content)
        write_text(path, _lines(content))


def _lines(content: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the content as JSON with one line per entry, so that a version control system shows which ones changed."""
    sections = []
    for section, entries in content.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(entry, ensure_ascii=False)}" for name, entry in entries.items()]
        sections.append(f" {json.dumps(section)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(sections) + "\n}\n"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other threads and processes from updating a file of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
