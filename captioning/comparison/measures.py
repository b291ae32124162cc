"""Metrics of runs over images and of variants over seeds, with intervals and tests against the first run or variant."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from captioning.comparison.result import ONE_SEED, Comparison, Row, Table, TableCell, Variant
from captioning.comparison.runs import Run
from captioning.evaluation.caption_files import CaptionedImage
from captioning.metrics.arrays import Floats, percentage
from captioning.metrics.bleu import bleu_metrics
from captioning.metrics.resampling import SIGNIFICANCE_LEVEL, Difference, Statistic, differences, holm, intervals
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
TestKey = tuple[str, str]  # the names of a run or a variant, and of a metric


class CountedFamily(NamedTuple):
    """Metrics that are functions of the same counts, and the counts of each run."""

    metrics: Mapping[str, Metric]  # by name
    counts: dict[str, Floats]  # by run, (images, counts)
    statistic: Statistic  # from counts summed over images, (.., counts), to percent, (.., metrics)
    is_baseline: bool = False  # whether the metrics are of attention that ignores the caption; they are not tested


def caption_families(images_by_run: Mapping[str, Sequence[CaptionedImage]], *, meteor: bool) -> list[CountedFamily]:
    """Return the metrics of captions, with METEOR if ``meteor`` and available."""
    families: dict[Family, CountedFamily] = {}
    for run, images in Progress("scoring captions", items=images_by_run.items(), unit=" runs"):
        hypotheses, references = [image.words for image in images], [image.reference_words for image in images]
        for family, counts in family_counts(hypotheses, references, meteor=meteor):
            families.setdefault(family, CountedFamily(family.metrics, {}, family.statistic)).counts[run] = counts
    return list(families.values())


def noun_families(images_by_run: Mapping[str, Sequence[CaptionedImage]]) -> list[CountedFamily]:
    """Return the metrics of attention at the nouns of captions and of references."""
    families = []
    for name, metric in sorted(NOUN_METRICS.items(), key=lambda item: item[0].startswith("reference_")):
        counts = {}
        for run, images in images_by_run.items():
            nouns = [[getattr(hit, metric.hit_field) for hit in getattr(image, metric.hit_list)] for image in images]
            if any(nouns):  # (images, 2): the sum over an image's nouns, and their number
                counts[run] = np.array([[sum(values), len(values)] for values in nouns], dtype=np.float64)
        if counts:
            families.append(CountedFamily({name: metric}, counts, percentage, is_baseline=metric.mode is None))
    return families


def add_run_table(
    comparison: Comparison,
    title: str,
    note: str,
    families: Sequence[CountedFamily],
    tested_runs: Sequence[str],
    *,
    resamples: int,
    seed: int,
) -> None:
    """Add to the comparison: the metrics of the runs, a table, and tests of ``tested_runs`` against the first run."""
    tests: dict[TestKey, Difference] = {}
    for family in Progress(f"{title}: intervals", items=families, unit=" metrics"):
        first = family.counts.get(comparison.runs[0])
        for run, counts in () if family.is_baseline else family.counts.items():
            run_intervals = intervals(counts, family.statistic, resamples=resamples, seed=seed)
            comparison.intervals.setdefault(run, {}).update(zip(family.metrics, run_intervals, strict=True))
            if run in tested_runs and first is not None:
                run_tests = differences(first, counts, family.statistic, resamples=resamples, seed=seed)
                tests |= {(run, metric): test for metric, test in zip(family.metrics, run_tests, strict=True)}
    _add_corrected(comparison.tests, tests)
    rows = [
        Row(TITLES[metric], [_run_cell(comparison, family, run, metric) for run in comparison.runs], family.is_baseline)
        for family in families
        for metric in family.metrics
    ]
    if "bleu4" in families[0].metrics:
        ratios = {run: bleu_metrics(counts.sum(axis=0))["length_ratio"] for run, counts in families[0].counts.items()}
        cells = [TableCell.plain(ratios.get(run), "{:.3f}") for run in comparison.runs]
        rows.append(Row(TITLES["length_ratio"], cells))
    note += f"{_CORRECTION_NOTE} The tests are over images; {ONE_SEED}." if tests else ""
    comparison.tables.append(Table(title, comparison.runs, rows, note))
    if len(tests) / (resamples + 1) >= SIGNIFICANCE_LEVEL:
        comparison.notices.append(
            f"{title}: {resamples} resamples are too few for {len(tests)} tests; no corrected p-value can be below "
            f"{SIGNIFICANCE_LEVEL}. Take at least {round(len(tests) / SIGNIFICANCE_LEVEL)}."
        )


def _run_cell(comparison: Comparison, family: CountedFamily, run: str, metric: str) -> TableCell:
    counts = family.counts.get(run)
    if counts is None:
        return TableCell()
    if family.is_baseline:
        return TableCell.plain(family.statistic(counts.sum(axis=0)).item(), "{:.1f}")
    interval = comparison.intervals[run][metric]
    count = int(counts[:, 1].sum())
    nouns = f", {count} {'noun' if count == 1 else 'nouns'}" if metric in NOUN_METRICS else ""
    test = comparison.tests.get(run, {}).get(metric)
    return TableCell.measured(interval.value, f"{interval.low:.1f} to {interval.high:.1f}{nouns}", test)


def add_variants(
    comparison: Comparison, variants: Sequence[Variant], families: Sequence[CountedFamily], runs: Sequence[Run]
) -> None:
    """Add the variants to the comparison, with a table of means and deviations over seeds.

    A variant is tested against the first one if both have several seeds and counts of every run.
    """
    families = [family for family in families if not family.is_baseline]
    tests: dict[TestKey, Difference] = {}
    for family in families:
        counted_variants = [variant for variant in variants if family.counts.keys() >= {*variant.runs}]
        counts = {variant.name: np.stack([family.counts[run] for run in variant.runs]) for variant in counted_variants}
        first = counts.get(variants[0].name, ())
        for variant in counted_variants:
            values = family.statistic(counts[variant.name].sum(axis=1))  # (seeds, metrics)
            variant.metrics.update(zip(family.metrics, values.T.tolist(), strict=True))
            if variant is not variants[0] and min(len(first), len(variant.runs)) > 1:
                variant_tests = seed_differences(first, counts[variant.name], family.statistic)
                tests |= {(variant.name, metric): t for metric, t in zip(family.metrics, variant_tests, strict=True)}
    _add_corrected(comparison.variant_tests, tests)
    for variant in variants:
        seeds = [run for run in runs if run.name in variant.runs]
        # The NLL of a test is over all of its images, so it is left out if fewer images are compared.
        if all(len(run.captions or ()) == comparison.image_count for run in seeds):
            common = [metric for metric in _NEEDS_MODEL if all(metric in run.metrics for run in seeds)]
            variant.metrics.update({metric: [run.metrics[metric] for run in seeds] for metric in common})
    comparison.variants = list(variants)
    titles = {metric: TITLES[metric] for family in families for metric in family.metrics}
    titles |= {m: f"{TITLES[m]}, {METRICS[m].unit}" for m in _NEEDS_MODEL if any(m in v.metrics for v in variants)}
    rows = [Row(title, [_variant_cell(comparison, v, metric) for v in variants]) for metric, title in titles.items()]
    note = _VARIANTS_NOTE + (_CORRECTION_NOTE if comparison.variant_tests else "")
    comparison.tables.append(Table("Variants over seeds", [variant.name for variant in variants], rows, note))


def _add_corrected(by_name: dict[str, dict[str, Difference]], tests: Mapping[TestKey, Difference]) -> None:
    """Add the tests of a table by name and metric, with p-values that are corrected for the number of tests."""
    for (name, metric), test in zip(tests, holm(list(tests.values())), strict=True):
        by_name.setdefault(name, {})[metric] = test


def _variant_cell(comparison: Comparison, variant: Variant, metric: str) -> TableCell:
    if metric not in variant.metrics:
        return TableCell()
    deviation = variant.deviation(metric)
    detail = "" if deviation is None else f"deviation {deviation:.2f} of {len(variant.runs)} seeds"
    test = comparison.variant_tests.get(variant.name, {}).get(metric)
    return TableCell.measured(variant.mean(metric), detail, test)
