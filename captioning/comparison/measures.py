"""Metrics of runs over images and of variants over seeds, with intervals and tests against the first one."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from captioning.comparison.result import ONE_SEED, Comparison, Row, Table, TableCell, Variant
from captioning.comparison.runs import Run
from captioning.evaluation.caption_files import CaptionedImage
from captioning.metrics.bleu import bleu_metrics
from captioning.metrics.resampling import (
    SIGNIFICANCE_LEVEL,
    Difference,
    Floats,
    Statistic,
    differences,
    holm,
    intervals,
    percentage,
)
from captioning.metrics.seeds import RULE, seed_differences
from captioning.metrics.table import METRICS, NOUN_METRICS, TITLES, Family, Metric, family_counts
from captioning.progress import Progress

_CORRECTION_NOTE = (
    " Bold: interval and test agree on a difference. The p-values are corrected for the tests in this table (Holm); "
    "the intervals are not."
)
_VARIANTS_NOTE = (
    "Mean and standard deviation of the runs that differ in their seed alone. Below: the difference from the first "
    "variant with its 95 % interval and p-value, over images and seeds (analysis of variance of Obuchowski and "
    f"Rockette; {RULE})."
)

_NEEDS_MODEL = [name for name, metric in METRICS.items() if metric.needs_model]

Key = tuple[str, str]  # the names of a run or a variant, and of a metric
Captions = Mapping[int, CaptionedImage]


class CountedFamily(NamedTuple):
    """S metrics that are functions of the same C counts."""

    metrics: Mapping[str, Metric]  # by name
    counts: dict[str, Floats]  # by run, (images, C)
    statistic: Statistic  # from counts summed over images, (.., C), to percent, (.., S)
    baseline: bool = False  # whether attention ignores the caption; not tested


def caption_families(images_by_run: Mapping[str, Sequence[CaptionedImage]], *, java: bool) -> list[CountedFamily]:
    """Return the metrics of captions, with METEOR if ``java`` and available."""
    families: dict[Family, CountedFamily] = {}
    for run, images in Progress("scoring captions", items=images_by_run.items(), unit=" runs"):
        hypotheses, references = [image.words for image in images], [image.reference_words for image in images]
        for family, counted in family_counts(hypotheses, references, java=java):
            families.setdefault(family, CountedFamily(family.metrics, {}, family.statistic)).counts[run] = counted
    return list(families.values())


def grounding_families(images_by_run: Mapping[str, Sequence[CaptionedImage]]) -> list[CountedFamily]:
    """Return the metrics of attention at the nouns of captions and of references."""
    families = []
    for name, metric in sorted(NOUN_METRICS.items(), key=lambda item: item[0].startswith("reference_")):
        counts = {}
        for run, images in images_by_run.items():
            judged = [[float(getattr(hit, metric.field)) for hit in getattr(image, metric.hits)] for image in images]
            if any(judged):  # (images, 2): the sum over an image's nouns, and their number
                counts[run] = np.array([[sum(values), len(values)] for values in judged], dtype=np.float64)
        if counts:
            families.append(CountedFamily({name: metric}, counts, percentage, baseline=metric.better is None))
    return families


def measure_runs(
    comparison: Comparison,
    title: str,
    note: str,
    families: Sequence[CountedFamily],
    compared: Sequence[str],
    *,
    resamples: int,
    seed: int,
) -> None:
    """Add the metrics of the runs to the comparison, with a table and tests of ``compared`` against the first run."""
    tests: dict[Key, Difference] = {}
    for family in Progress(f"{title}: intervals", items=families, unit=" metrics"):
        first = family.counts.get(comparison.runs[0])
        for run, counts in () if family.baseline else family.counts.items():
            with_ends = intervals(counts, family.statistic, resamples=resamples, seed=seed)
            comparison.metrics.setdefault(run, {}).update(zip(family.metrics, with_ends, strict=True))
            if run in compared and first is not None:
                changes = differences(first, counts, family.statistic, resamples=resamples, seed=seed)
                tests |= {(run, key): change for key, change in zip(family.metrics, changes, strict=True)}
    _add_corrected(comparison.tests, tests)
    rows = [
        Row(TITLES[key], [_run_cell(comparison, family, run, key) for run in comparison.runs], family.baseline)
        for family in families
        for key in family.metrics
    ]
    if "bleu4" in families[0].metrics:
        ratios = {run: bleu_metrics(counts.sum(axis=0))["length_ratio"] for run, counts in families[0].counts.items()}
        rows.append(Row(TITLES["length_ratio"], [TableCell.plain(ratios.get(n), "{:.3f}") for n in comparison.runs]))
    note += f"{_CORRECTION_NOTE} The tests are over images; {ONE_SEED}." if tests else ""
    comparison.tables.append(Table(title, comparison.runs, rows, note))
    if len(tests) / (resamples + 1) >= SIGNIFICANCE_LEVEL:
        comparison.notices.append(
            f"{title}: {resamples} resamples are too few for {len(tests)} tests; no corrected p-value can be below "
            f"{SIGNIFICANCE_LEVEL}. Take at least {round(len(tests) / SIGNIFICANCE_LEVEL)}."
        )


def _run_cell(comparison: Comparison, family: CountedFamily, run: str, key: str) -> TableCell:
    counts = family.counts.get(run)
    if counts is None:
        return TableCell()
    if family.baseline:
        return TableCell.plain(family.statistic(counts.sum(axis=0)).item(), "{:.1f}")
    metric, count = comparison.metrics[run][key], int(counts[:, 1].sum())
    nouns = f", {count} noun{'s' * (count != 1)}" if key in NOUN_METRICS else ""
    test = comparison.tests.get(run, {}).get(key)
    return TableCell.measured(metric.value, f"{metric.low:.1f} to {metric.high:.1f}{nouns}", test)


def measure_variants(
    comparison: Comparison, variants: Sequence[Variant], families: Sequence[CountedFamily], runs: Sequence[Run]
) -> None:
    """Add the variants to the comparison, with a table of means and deviations over seeds.

    Variants are tested against the first one if both have several seeds and all counts.
    """
    families = [family for family in families if not family.baseline]
    tests: dict[Key, Difference] = {}
    for family in families:
        complete = [variant for variant in variants if family.counts.keys() >= {*variant.runs}]
        counts = {variant.name: np.stack([family.counts[run] for run in variant.runs]) for variant in complete}
        first = counts.get(variants[0].name, ())
        for variant in complete:
            values = family.statistic(counts[variant.name].sum(axis=1))  # (seeds, S)
            variant.metrics.update(zip(family.metrics, values.T.tolist(), strict=True))
            if variant is not variants[0] and min(len(first), len(variant.runs)) > 1:
                changes = seed_differences(first, counts[variant.name], family.statistic)
                tests |= {(variant.name, key): change for key, change in zip(family.metrics, changes, strict=True)}
    _add_corrected(comparison.variant_tests, tests)
    for variant in variants:
        members = [run for run in runs if run.name in variant.runs]
        # The metrics of a run's test are over all of its images.
        if all(len(run.captions or ()) == comparison.image_count for run in members):
            stored = [key for key in _NEEDS_MODEL if all(key in run.metrics for run in members)]
            variant.metrics.update({key: [run.metrics[key] for run in members] for key in stored})
    comparison.variants = list(variants)
    titles = {key: TITLES[key] for family in families for key in family.metrics}
    stored = [key for key in _NEEDS_MODEL if any(key in variant.metrics for variant in variants)]
    titles |= {key: f"{TITLES[key]}, {METRICS[key].unit}" for key in stored}
    rows = [
        Row(title, [_variant_cell(comparison, variant, key) for variant in variants]) for key, title in titles.items()
    ]
    note = _VARIANTS_NOTE + (_CORRECTION_NOTE if comparison.variant_tests else "")
    comparison.tables.append(Table("Variants over seeds", [variant.name for variant in variants], rows, note))


def _add_corrected(stored: dict[str, dict[str, Difference]], tests: Mapping[Key, Difference]) -> None:
    """Store the tests of a table, with p-values that are corrected for their number."""
    for (name, key), test in zip(tests, holm(list(tests.values())), strict=True):
        stored.setdefault(name, {})[key] = test


def _variant_cell(comparison: Comparison, variant: Variant, key: str) -> TableCell:
    if key not in variant.metrics:
        return TableCell()
    deviation = variant.deviation(key)
    detail = "" if deviation is None else f"deviation {deviation:.2f} of {len(variant.runs)} seeds"
    test = comparison.variant_tests.get(variant.name, {}).get(key)
    return TableCell.measured(variant.mean(key), detail, test)
