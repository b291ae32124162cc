"""Attributes that captions get right, of those that they mention: colour, shape and whatever else a data set knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from captioning.data.attributes import JudgedAttribute


class AttributeCount(NamedTuple):
    """How often an attribute was right, how often it was said at all, and how often it was not though it is there."""

    right: int = 0
    said: int = 0
    unsaid: int = 0

    @property
    def accuracy(self) -> float:
        """Percent of what is said that is right; 0 if nothing is said."""
        return 100 * self.right / max(1, self.said)

    @property
    def unsaid_rate(self) -> float:
        """Percent of what there is to say, right or wrong, that is not said."""
        return 100 * self.unsaid / max(1, self.said + self.unsaid)


def count_attributes(judged: Iterable[JudgedAttribute]) -> dict[str, AttributeCount]:
    """Return the counts of every attribute by its name, in alphabetical order."""
    counts: dict[str, AttributeCount] = {}
    for item in judged:
        right, said, unsaid = counts.get(item.attribute, AttributeCount())
        mentioned = item.said is not None
        counts[item.attribute] = AttributeCount(right + item.right, said + mentioned, unsaid + (not mentioned))
    return dict(sorted(counts.items()))


def attribute_scores(judged: Iterable[JudgedAttribute]) -> dict[str, float]:
    """Return ``attribute_NAME`` and ``attribute_NAME_unsaid``, in percent, for every attribute; {} without any."""
    scores = {}
    for name, count in count_attributes(judged).items():
        scores[f"attribute_{name}"] = count.accuracy
        scores[f"attribute_{name}_unsaid"] = count.unsaid_rate
    return scores


def attribute_table(judged: Iterable[JudgedAttribute]) -> list[str]:
    """Return lines of the accuracy of every attribute with its denominators; [] without any."""
    lines = [
        f"{name:20}{count.accuracy:8.2f}{count.right:>8} of {count.said:<6}{count.unsaid:>10}"
        for name, count in count_attributes(judged).items()
    ]
    return [f"{'':20}{'right, %':>8}{'right of said':>18}{'not said':>10}", *lines] if lines else []
