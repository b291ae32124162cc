"""The table of where attention looked at nouns that name an object with a known mask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from captioning.comparison.measures import Measure, Scored
from captioning.evaluation.records import CaptionedImage
from captioning.evaluation.resampling import Floats, percentage

TITLE = "Grounding"
NOTE = (
    "Over the nouns that name an object with a known mask, percent. Pointing accuracy: the strongest location "
    "touches the object; attention correctness: the fraction of attention on it. Beneath each: what attention "
    "that ignores the caption gets at the same nouns."
)

# Row title -> the field of a noun's judgement whose mean it is, and whether it is a baseline: what attention that
# ignores the caption would score at the same nouns.
_ROWS = {
    "Pointing accuracy": ("hit", False),
    "by chance": ("chance", True),
    "always the centre": ("centre_hit", True),
    "Attention correctness": ("correctness", False),
    "spread evenly": ("uniform", True),
    "around the centre": ("centre", True),
}
_CAPTIONS = {"": "hits", ", reference captions": "reference_hits"}  # of what -> the judgements of their nouns


def grounding_measures(scored: Scored) -> list[Measure]:
    """Return measures of generated captions, and of references, whose nouns are the same for all runs."""
    measures = []
    for captions_of, judgements in _CAPTIONS.items():
        for row, (column, baseline) in _ROWS.items():
            title = row + captions_of
            counts = {
                name: nouns
                for name, captions, ids in scored.images()
                if (nouns := _noun_counts(captions, ids, judgements, column)) is not None
            }
            if counts:
                key = title.lower().replace(",", "").replace(" ", "_")
                measures.append(Measure((key,), (title,), counts, percentage, baseline, "nouns"))
    return measures


def _noun_counts(
    captions: dict[int, CaptionedImage], ids: Sequence[int], judgements: str, column: str
) -> Floats | None:
    """Return (images, 2): the sum over an image's nouns, and their number. None without nouns."""
    judged = [[getattr(hit, column) for hit in getattr(captions[i], judgements)] for i in ids]
    if not any(judged):
        return None
    return np.array([[sum(map(float, values)), len(values)] for values in judged], dtype=np.float64)
