"""Variants: mean and deviation over their seeds, and tests over seeds and images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from captioning.comparison.measures import Measure
from captioning.comparison.result import CORRECTED, Cell, Comparison, Group, Row, Table
from captioning.comparison.runs import Run
from captioning.metrics.resampling import Difference, holm
from captioning.metrics.seeds import RULE, seed_differences
from captioning.metrics.table import TITLES

_LOGGED = ("nll", "bound", "iwae_bound")  # metrics that runs log themselves, in nats per word


class VariantTest(NamedTuple):
    """The difference between the means of a variant and of a reference, tested over images and seeds.

    If paired, each run of the variant is compared with one run of the reference, such as the run that it started from.
    """

    variant: str
    reference: str
    measure: str
    difference: Difference
    paired: bool


def compare_variants(
    groups: Sequence[Group],
    references: Sequence[str],
    measures: Sequence[Measure],
    pairing: Callable[[Group, Group], bool] = lambda reference, group: False,
) -> list[VariantTest]:
    """Return uncorrected tests of every variant against every reference, each pair once; both need several seeds.

    A group whose runs lack the counts of a measure is left out. ``pairing`` returns whether the runs of the second
    group are paired with the runs of the first, in their order.
    """
    several = [group for group in groups if len(group.runs) > 1]
    tests = []
    for measure in measures:
        tested = {group.name: group for group in several if measure.counts.keys() >= set(group.runs)}
        for number, reference in enumerate(references):
            for group in tested.values():
                if group.name in references[: number + 1] or reference not in tested:
                    continue
                pair = (tested[reference], group)
                first, second = (np.stack([measure.counts[run] for run in variant.runs]) for variant in pair)
                paired = pairing(*pair)
                differences = seed_differences(first, second, measure.values, paired=paired)
                for key, difference in zip(measure.keys, differences, strict=True):
                    tests.append(VariantTest(group.name, reference, key, difference, paired))
    return tests


def correct(tests: Sequence[VariantTest]) -> list[VariantTest]:
    """Return the tests of one table, corrected for their number (Holm)."""
    corrected = holm([test.difference for test in tests])
    return [test._replace(difference=new) for test, new in zip(tests, corrected, strict=True)]


def add_variants(result: Comparison, measures: Sequence[Measure], groups: list[Group], runs: Mapping[str, Run]) -> None:
    """Add mean and deviation of every group, and its tests against the first group, as the first table."""
    result.groups = groups
    titles = {key: TITLES[key] for measure in measures for key in measure.keys}
    for measure in measures:
        for group in groups:
            if all(run in measure.counts for run in group.runs):
                values = [np.atleast_1d(measure.values(measure.counts[run].sum(axis=0))) for run in group.runs]
                group.scores |= {key: [float(v[i]) for v in values] for i, key in enumerate(measure.keys)}
    tests = correct(compare_variants(groups, [groups[0].name], measures)) if result.images else []
    for test in tests:
        result.group_tests.setdefault(test.variant, {})[test.measure] = test.difference
    for key in _LOGGED:
        for group in groups:
            of_group = [runs[run] for run in group.runs]
            # A run's own scores are those of all its images.
            on_common = all(not result.images or len(run.captions or ()) == result.images for run in of_group)
            if on_common and all(key in run.scores for run in of_group):
                titles[key] = f"{TITLES[key]}, nats per word"
                group.scores[key] = [run.scores[key] for run in of_group]
    if len(groups) > 1 and (single := [group.name for group in groups if len(group.runs) == 1]):
        result.notices.append(f"One seed each: {', '.join(single)}. Differences from them are not tested over seeds.")
    rows = [Row(title, [_cell(result, group, key) for group in groups]) for key, title in titles.items()]
    note = (
        "Mean and standard deviation of the runs that differ in their seed alone. Below: the difference "
        "from the first variant with its 95 % interval and p-value, over images and seeds (analysis of variance of "
        f"Obuchowski and Rockette; {RULE})."
    )
    columns = [group.name for group in groups]
    result.tables.insert(0, Table("Variants over seeds", rows, note + CORRECTED * bool(tests), columns))


def _cell(result: Comparison, group: Group, key: str) -> Cell:
    if key not in group.scores:
        return Cell()
    mean, deviation = group.mean(key), group.deviation(key)
    detail = "" if deviation is None else f"deviation {deviation:.2f} of {len(group.runs)} seeds"
    return Cell.measured(mean, detail, result.group_tests.get(group.name, {}).get(key))
