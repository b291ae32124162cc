"""The tables of a study: the comparison of its variants over seeds, made from the file of its measurements."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from captioning.comparison.formats import change_text
from captioning.comparison.groups import Pairing
from captioning.comparison.markdown import markdown
from captioning.comparison.measurements import (
    TRAINING_STATISTICS,
    Scores,
    read_comparison,
    read_scores,
    score_name,
    write_comparison,
)
from captioning.comparison.measures import Measure
from captioning.comparison.result import Cell, Group, Row, Table
from captioning.comparison.runs import Run, is_run_folder, read_run
from captioning.comparison.study import Study
from captioning.comparison.variants_table import VariantTest, compare_variants, correct
from captioning.comparison.verdicts import ONE_SEED
from captioning.errors import InputError
from captioning.evaluation.bleu import bleu_counts, bleu_from_counts
from captioning.evaluation.resampling import Difference, Floats, Interval
from captioning.evaluation.seeds import RULE
from captioning.files import write_text

_METRIC = "bleu4"  # of the tests
_COLUMNS = {  # score -> title and decimals; a column is left out if no variant has the score for all of its seeds
    "bleu4": ("BLEU-4", 2),
    "cider_d": ("CIDEr-D", 2),
    "nll": ("NLL", 3),
    "pointing_accuracy": ("pointing", 1),
}
_SPEED = "captions_per_second"
_SHOWN_TENTHS = (0, 4, 9)
_ROUNDING = 0.01  # scores that differ by less are the same


def write_report(study: Study, measurements: Path, runs: Path, page: Path, provenance: Mapping[str, Any]) -> list[str]:
    """Write the tables of a study into a page, and its tests into the file of its measurements.

    Args:
        study: The study.
        measurements: The folder of the measurements.
        runs: The folder of the runs, for their captions. Without them a test is taken from the last report, as long as
            the scores are the same.
        page: A Markdown file with two comments between which the tables belong.
        provenance: The command of the report and where it ran.

    Returns:
        Sentences on what could not be tested.

    Raises:
        InputError: A file is damaged, runs were scored on different images, or the page has no place for the study.
    """
    file = study.measurements(measurements)
    scores = read_scores(file)
    groups = [_group(study, name, scores) for name in study.variants]
    counts, notices = _bleu_counts(groups, runs)
    measure = Measure((_METRIC,), ("BLEU-4",), counts, _bleu4)
    tests = compare_variants(groups, study.references, [measure], _pairing(study))
    made = {(test.variant, test.reference) for test in tests}
    tests += [test for test in _written_tests(file, study, groups) if (test.variant, test.reference) not in made]
    tests = correct(sorted(tests, key=lambda test: study.references.index(test.reference)))
    tables = "\n\n".join(_tables(study, groups, scores, tests))
    _insert(page, study.name, f"Made by `{provenance['command']}`. A dash: not measured, or not tested.\n\n{tables}")
    if tests:
        seeds = {group.name: list(map(int, group.seeds)) for group in groups}
        plain = [
            {
                "variant": test.variant,
                "reference": test.reference,
                "variant_seeds": seeds[test.variant],
                "reference_seeds": seeds[test.reference],
                "paired": test.paired,
                **vars(test.difference.interval),
                "p_value": test.difference.p_value,
                "corrected_p_value": test.difference.corrected,
            }
            for test in tests
        ]
        write_comparison(file, study.name, {"metric": _METRIC, "rule": RULE, "tests": plain, **provenance})
    return notices


# The variants


def _by_seed(study: Study, scores: Mapping[str, Scores], variant: str, evaluation: str = "") -> dict[int, Scores]:
    names = {seed: score_name(variant, seed, evaluation) for seed in study.seeds}
    return {seed: scores[name] for seed, name in names.items() if name in scores}


def _group(study: Study, variant: str, scores: Mapping[str, Scores]) -> Group:
    """Return the runs of a variant that are measured, with the scores that all of them have."""
    entries = _by_seed(study, scores, variant)
    values = [entry["values"] | entry.get("training", {}) for entry in entries.values()]
    common = [key for key in (*_COLUMNS, _SPEED) if values and all(key in run for run in values)]
    return Group(
        variant,
        [study.run_name(variant, seed) for seed in entries],
        list(map(str, entries)),
        {key: [run[key] for run in values] for key in common},
    )


def _bleu_counts(groups: Sequence[Group], runs: Path) -> tuple[dict[str, Floats], list[str]]:
    """Return BLEU's counts (images, C) of the runs of variants with several seeds.

    A run whose scored captions are not there is left out, with a notice.

    Raises:
        InputError: Runs were scored on different images.
    """
    counts: dict[str, Floats] = {}
    images: dict[Path, set[int]] = {}
    missing = []
    for group in groups:
        if len(group.runs) < 2:
            continue
        for name, bleu4 in zip(group.runs, group.scores[_METRIC], strict=True):
            run = _scored_run(runs / name, bleu4)
            if run is None or run.captions is None:
                missing.append(runs / name)
            else:
                ordered = [image for _, image in sorted(run.captions.items())]
                counted = bleu_counts([image.words for image in ordered], [image.reference_words for image in ordered])
                counts[name] = np.asarray(counted, dtype=np.float64)
                images[runs / name] = set(run.captions)
    for folder, ids in images.items():
        first = next(iter(images))
        if ids != images[first]:
            raise InputError(f"{folder} and {first} were scored on different images; score one of them again")
    if not missing:
        return counts, []
    folders = ", ".join(map(str, missing))
    return counts, [f"{folders}: no captions with these scores; delete the runs' scores and run the study to make them"]


def _scored_run(folder: Path, bleu4: float) -> Run | None:
    """Return a run whose captions have this score; None if there is none or it was scored again since."""
    run = read_run(folder) if is_run_folder(folder) else None
    return run if run is not None and abs(run.scores.get(_METRIC, -1) - bleu4) < _ROUNDING else None


def _bleu4(summed: Floats) -> Floats:
    return np.asarray(bleu_from_counts(summed)[..., 3])


def _pairing(study: Study) -> Pairing:
    def pairing(reference: Group, group: Group) -> list[str] | None:
        related = study.starts_from(group.name, reference.name) or study.starts_from(reference.name, group.name)
        return group.runs if related and group.seeds == reference.seeds else None

    return pairing


def _written_tests(file: Path, study: Study, groups: Sequence[Group]) -> Iterator[VariantTest]:
    """Yield the tests of the last report by today's rule whose variants still have these scores.

    Raises:
        InputError: The file is damaged.
    """
    seeds = {group.name: list(map(int, group.seeds)) for group in groups}
    means = {group.name: group.mean(_METRIC) for group in groups if group.runs}
    try:
        comparison = read_comparison(file, study.name)
        for entry in comparison.get("tests", []) if comparison.get("rule") == RULE else []:
            variant, reference = entry["variant"], entry["reference"]
            if not {variant, reference} <= means.keys() or reference not in study.references:
                continue
            interval = Interval(entry["value"], entry["low"], entry["high"])
            same_scores = abs(interval.value - (means[variant] - means[reference])) < _ROUNDING
            if same_scores and (entry["variant_seeds"], entry["reference_seeds"]) == (seeds[variant], seeds[reference]):
                difference = Difference(interval, entry["p_value"], entry["corrected_p_value"])
                yield VariantTest(variant, reference, _METRIC, difference, entry["paired"])
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file}: comparisons.{study.name}: not what a study writes; delete it") from error


# The tables


def _tables(
    study: Study, groups: Sequence[Group], scores: Mapping[str, Scores], tests: Sequence[VariantTest]
) -> Iterator[str]:
    """Yield the tables of the scores and of the further evaluations as Markdown."""
    columns = {key: column for key, column in _COLUMNS.items() if any(key in group.scores for group in groups)}
    references = [name for name in study.references if any(test.reference == name for test in tests)]
    titles = ["seeds", *(title for title, _ in columns.values()), "captions/s"]
    titles += [f"BLEU-4, difference from {study.label(name)}" for name in references]
    rows = []
    for group in groups:
        cells = [Cell(", ".join(group.seeds))]
        cells += [Cell(_spread(group.scores.get(key, []), places)) for key, (_, places) in columns.items()]
        cells.append(Cell(f"{statistics.median(group.scores[_SPEED]):.0f}" if _SPEED in group.scores else ""))
        cells += [_difference_cell(tests, group.name, reference) for reference in references]
        rows.append(Row(study.label(group.name), cells))
    measured = [entry for group in groups for entry in _by_seed(study, scores, group.name).values()]
    images = dict.fromkeys(f"{entry['split']}, {entry['images']:,} images" for entry in measured)
    yield markdown(Table("", rows, _note(groups, tests), titles), titles, "; ".join(images))
    yield from _over_training(study, groups, scores)
    titles = list(dict.fromkeys(name for variant in study.variants.values() for name in variant.evaluations))
    rows = []
    for group in groups:
        if study.variants[group.name].evaluations:
            cells = [_evaluation_cell(study, scores, group, name) for name in titles]
            rows.append(Row(study.label(group.name), [Cell(_spread(group.scores.get(_METRIC, []), 2)), *cells]))
    if rows:
        titles = ["as above", *titles]
        yield markdown(Table("", rows, "", titles), titles, "BLEU-4 by evaluation")


def _over_training(study: Study, groups: Sequence[Group], scores: Mapping[str, Scores]) -> Iterator[str]:
    """Yield the table of the statistics of training, if hard attention was trained by REINFORCE."""
    rows = []
    for group in groups:
        training = [entry.get("training", {}) for entry in _by_seed(study, scores, group.name).values()]
        cells = []
        for name in TRAINING_STATISTICS:
            curves = [run[name] for run in training if name in run]
            shown = [[curve[tenth] for curve in curves if curve[tenth] is not None] for tenth in _SHOWN_TENTHS]
            texts = [f"{statistics.fmean(values):.2f}" if values else "-" for values in shown]
            cells.append(Cell(", ".join(texts) if any(shown) else ""))
        if any(cell.text for cell in cells):
            rows.append(Row(study.label(group.name), cells))
    titles = list(TRAINING_STATISTICS.values())
    if any(row.cells[titles.index("baseline")].text for row in rows):
        logged = [column for column in range(len(titles)) if any(row.cells[column].text for row in rows)]
        titles = [titles[column] for column in logged]
        rows = [Row(row.name, [row.cells[column] for column in logged]) for row in rows]
        note = (
            "Means over seeds in the first, fifth and last tenth of the training, a dash where nothing was logged. The "
            "return is that of the whole caption with a moving average, and of the words from the draw on otherwise."
        )
        yield markdown(Table("", rows, note, titles), titles, "While training")


def _note(groups: Sequence[Group], tests: Sequence[VariantTest]) -> str:
    note = "Mean (standard deviation) over seeds. Captions/s: median of what training logged; other programs ran, too."
    if any(len(group.runs) == 1 for group in groups):
        note += f" Rows without a deviation have {ONE_SEED}."
    if tests:
        note += (
            " Differences: 95 % interval over images and seeds (`captioning/evaluation/seeds.py`), p-values corrected "
            f"for the {len(tests)} tests of the table (Holm). Bold: interval and test agree that there is a difference."
        )
    if any(test.paired for test in tests):
        note += (
            " *Paired*: each run is compared with the run of the same seed, because one of the two started from the "
            "other or is a mean that contains it."
        )
    return note


def _spread(values: Sequence[float], places: int) -> str:
    """Return the mean and the deviation of several seeds, the value of one seed, or nothing."""
    if not values:
        return ""
    deviation = f" ({np.std(values, ddof=1):.{places}f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{places}f}{deviation}"


def _difference_cell(tests: Sequence[VariantTest], variant: str, reference: str) -> Cell:
    for test in tests:
        if (test.variant, test.reference) == (variant, reference):
            return Cell(change_text(test.difference), "*paired*" * test.paired, best=test.difference.clear)
    return Cell("")


def _evaluation_cell(study: Study, scores: Mapping[str, Scores], group: Group, evaluation: str) -> Cell:
    """Return the score of an evaluation; of fewer seeds than beside it, with the seeds."""
    if evaluation not in study.variants[group.name].evaluations:
        return Cell("")
    entries = _by_seed(study, scores, group.name, evaluation)
    text = _spread([entry["values"][_METRIC] for entry in entries.values()], 2)
    partial = entries and list(map(str, entries)) != group.seeds
    return Cell(text, f"seed {', '.join(map(str, entries))}" if partial else "")


def _insert(page: Path, name: str, text: str) -> None:
    """Replace what stands in a page between the study's two comments.

    Raises:
        InputError: The page cannot be read or has no place for the study.
    """
    begin, end = f"<!-- study {name} -->", "<!-- end -->"
    try:
        content = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--report {page}: cannot be read ({error})") from error
    before, begun, rest = content.partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise InputError(f"--report {page}: has no place for the study; add two lines, {begin} and {end}")
    write_text(page, f"{before}{begin}\n{text}\n\n{end}{after}", "--report")
