"""What the paper reports, beside runs: its Table 1, test splits, VGG-19, BLEU without brevity penalty."""

from __future__ import annotations

from collections.abc import Sequence

from captioning.comparison.result import Cell, Comparison, Row, Table
from captioning.comparison.runs import Run
from captioning.evaluation.metrics import TITLES

_NAMES = ("bleu1", "bleu2", "bleu3", "bleu4", "meteor")
_SOFT, _HARD = "paper, soft", "paper, hard"

TABLE_1: dict[str, dict[str, tuple[float, ...]]] = {
    "flickr8k": {_SOFT: (67, 44.8, 29.9, 19.5, 18.93), _HARD: (67, 45.7, 31.4, 21.3, 20.30)},
    "flickr30k": {_SOFT: (66.7, 43.4, 28.8, 19.1, 18.49), _HARD: (66.9, 43.9, 29.6, 19.9, 18.46)},
    "coco": {_SOFT: (70.7, 49.2, 34.4, 24.3, 23.90), _HARD: (71.8, 50.4, 35.7, 25.0, 23.04)},
}
"""By data set and attention, the values of BLEU-1 to 4 and METEOR in percent."""


def compare_with_paper(result: Comparison, runs: Sequence[Run], data: str) -> None:
    """Add a table of the paper's scores on a data set, a key of ``TABLE_1``, and those of the runs' tests."""
    columns = [_SOFT, _HARD, *result.runs]
    runs = sorted(runs, key=lambda run: result.runs.index(run.name))
    rows = []
    for number, name in enumerate(_NAMES):
        reported = [TABLE_1[data][paper][number] for paper in (_SOFT, _HARD)]
        cells = [Cell(f"{value:.2f}", value=value) for value in reported]
        for run in runs:
            value = run.scores.get(name if name == "meteor" else f"{name}_no_penalty")
            changes = [] if value is None else [f"{value - score:+.2f}" for score in reported]
            cells.append(Cell("") if value is None else Cell(f"{value:.2f}", change=" and ".join(changes), value=value))
        rows.append(Row(TITLES[name], cells))
    note = (
        "Percent, BLEU without brevity penalty as in the paper, whose tokens and test images may differ. "
        "Below: the difference from its soft and from its hard attention."
    )
    if elsewhere := [
        f"{run.name} ({split})" for run in runs if (split := run.search.get("split", "split unknown")) != "test"
    ]:
        note = f"Not scored on the test split: {', '.join(elsewhere)}. {note}"
    result.tables.insert(0, Table(f"The paper's Table 1, {data}", rows, note, columns))
