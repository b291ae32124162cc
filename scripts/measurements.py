"""The measurements of a study in one JSON file: the scores of every run, and the tests between its variants.

{"scores": {"soft_1": .., "soft_1_beam5": ..}, "comparisons": {"shapes": ..}}
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from captioning.comparison.runs import read_run
from captioning.files import read_json, write_text
from captioning.metrics.table import UNIT
from captioning.provenance import provenance

Scores = dict[str, Any]
"""The metrics of one run: "values" in percent, their "unit", and their provenance."""


def measurement_of(folder: Path, arguments: Sequence[str], seed: int) -> Scores:
    """Return the metrics that ``captioning test`` wrote into a folder, with their provenance."""
    run = read_run(folder)
    return {
        "values": {name: round(value, 4) for name, value in run.metrics.items()},
        "unit": UNIT,
        "split": run.conditions.get("split"),
        "images": len(run.captions or {}),
        "conditions": run.conditions,
        **provenance(command=f"captioning {shlex.join(arguments)}", seed=seed),
    }


def score_name(variant: str, seed: int, evaluation: str = "") -> str:
    return "_".join(filter(None, (variant, str(seed), evaluation)))


def read_scores(path: Path) -> dict[str, Scores]:
    """Return the scores in a study's file by name, {} if the file is missing."""
    return read_json(path).get("scores", {}) if path.exists() else {}


def write_measurements(path: Path, **sections: Mapping[str, Any]) -> None:
    """Replace sections of a study's file. Each entry is one line, so that a diff is readable."""
    content = (read_json(path) if path.exists() else {}) | sections
    section_texts = []
    for section, entries in content.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(entry, ensure_ascii=False)}" for name, entry in entries.items()]
        section_texts.append(f" {json.dumps(section)}: {{\n" + ",\n".join(lines) + "\n }")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "{\n" + ",\n".join(section_texts) + "\n}\n")
