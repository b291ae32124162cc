"""Where the runs' attention looked at nouns that name an object with a known mask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from captioning.comparison.formats import key_of, measured_cell, plain_cell, with_best
from captioning.comparison.result import Cell, Comparison, Row, Table
from captioning.comparison.scored import CORRECTED, Scored, add_tests
from captioning.evaluation.records import CaptionedImage
from captioning.evaluation.resampling import Difference, Floats, percentage

# Row title -> the field of a noun's judgement whose mean it is, and whether it is the run's own score: the others are
# what attention that ignores the caption would score at the same nouns.
GROUNDING = {
    "Pointing accuracy": ("hit", True),
    "by chance": ("chance", False),
    "always the centre": ("centre_hit", False),
    "Attention correctness": ("correctness", True),
    "spread evenly": ("uniform", False),
    "around the centre": ("centre", False),
}


CAPTIONS = {"": "hits", ", reference captions": "reference_hits"}  # of what -> the judgements of their nouns


def compare_grounding(result: Comparison, scored: Scored) -> None:
    """Of generated captions with intervals and tests, and of references, whose nouns are the same for all runs."""
    first = result.runs[0]
    measured: dict[tuple[str, str, bool], dict[str, Floats]] = {}
    tests: dict[tuple[str, str], Difference] = {}
    for where, of in CAPTIONS.items():
        for title, (column, own) in GROUNDING.items():
            counts = {
                name: nouns
                for name, captions, ids in scored.images()
                if (nouns := noun_counts(captions, ids, of, column)) is not None
            }
            if not counts:
                continue
            measured[title, where, own] = counts
            if own and first in counts:
                for name in [name for name in scored.compared if name in counts]:
                    (tests[name, key_of(title + where)],) = scored.differences(counts[first], counts[name], percentage)
    if not measured:
        return
    add_tests(result, tests, scored.resamples)
    rows = []
    for (title, where, own), counts in measured.items():
        cells = []
        for run in result.runs:
            if run not in counts:
                cells.append(Cell(""))
            elif own:
                (interval,) = scored.intervals(counts[run], percentage)
                test = result.tests.get(run, {}).get(key_of(title + where))
                cells.append(measured_cell(interval, test, of=f"{int(counts[run][:, 1].sum())} nouns"))
            else:
                cells.append(plain_cell(float(percentage(counts[run].sum(axis=0))), "{:.1f}"))
        rows.append(Row(title + where, with_best(cells, max) if own and scored.common else cells, baseline=not own))
    note = (
        "Over the nouns that name an object with a known mask, percent. Pointing accuracy: the strongest location "
        "touches the object; attention correctness: the fraction of attention on it. Beneath each: what attention "
        f"that ignores the caption gets at the same nouns.{CORRECTED * bool(tests)}"
    )
    result.tables.append(Table("Grounding", rows, note))


def noun_counts(captions: dict[int, CaptionedImage], ids: Sequence[int], of: str, column: str) -> Floats | None:
    """(images, 2): the sum over an image's nouns, and how many there are; None if there are none, or not this one."""
    judged = [[getattr(hit, column) for hit in getattr(captions[i], of)] for i in ids]
    if not any(judged) or any(value is None for values in judged for value in values):
        return None
    return np.array([[sum(map(float, values)), len(values)] for values in judged], dtype=np.float64)
