"""The tables of a study: the comparison of its variants over seeds, made from the file of its measurements."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from measurements import Scores, read_scores, score_name, write_measurements
from study_file import TRAINING, Study

from captioning.comparison.result import ONE_SEED, Variant, change_text
from captioning.comparison.runs import is_run_folder, read_run
from captioning.errors import InputError
from captioning.files import read_json, write_text
from captioning.metrics.arrays import Floats
from captioning.metrics.bleu import bleu_counts, bleu_from_counts
from captioning.metrics.resampling import Difference, Interval, holm
from captioning.metrics.seeds import RULE, seed_differences

METRIC = "bleu4"  # the metric that is tested
COLUMNS = {  # metric -> title and decimals; a column is left out if no variant has the metric for all of its seeds
    "bleu4": ("BLEU-4", 2),
    "cider_d": ("CIDEr-D", 2),
    "nll": ("NLL", 3),
    "pointing_accuracy": ("pointing", 1),
}
_SHOWN_TENTHS = (0, 9)  # the first and the last tenth of a training
_ROUNDING = 0.01  # scores that differ by less are equal


class VariantTest(NamedTuple):
    """The difference between the means of a variant and of a reference, tested over images and seeds.

    If paired, each run of the variant is compared with one run of the reference, such as the run that it started from.
    """

    variant: str
    reference: str
    difference: Difference
    paired: bool


def write_report(study: Study, file: Path, runs: Path, page: Path, provenance: Mapping[str, Any]) -> list[str]:
    """Write the tables of a study into a page, and its tests into the file of its measurements.

    Args:
        study: The study.
        file: The measurements.
        runs: The folder of the runs, with their captions. Tests of runs without captions are taken from the last
            report, if the scores are the same.
        page: A Markdown file; the tables are written between two comments in it.
        provenance: The command of the report and where it ran.

    Returns:
        Sentences on runs that could not be tested.

    Raises:
        InputError: A file is damaged, runs were scored on different images, or the page has no place for the study.
    """
    scores = read_scores(file)
    groups = [_group(study, name, scores) for name in study.variants]
    counts, missing = _bleu_counts(groups, runs)
    tests = list(_tests(study, groups, counts))
    tested_pairs = {(test.variant, test.reference) for test in tests}
    comparisons = (read_json(file) if file.exists() else {}).get("comparisons", {})
    earlier_tests = _earlier_tests(comparisons.get(study.name, {}), study, groups)
    tests += [test for test in earlier_tests if (test.variant, test.reference) not in tested_pairs]
    tests.sort(key=lambda test: study.references.index(test.reference))
    differences = holm([test.difference for test in tests])
    tests = [test._replace(difference=difference) for test, difference in zip(tests, differences, strict=True)]
    tables = "\n\n".join(_tables(study, groups, scores, tests))
    _insert(page, study.name, f"Made by `{provenance['command']}`. A dash: not measured, or not tested.\n\n{tables}")
    if tests:
        seeds = {group.name: list(map(int, group.seeds)) for group in groups}
        entries = [
            {"variant": test.variant, "reference": test.reference, "paired": test.paired}
            | {"variant_seeds": seeds[test.variant], "reference_seeds": seeds[test.reference]}
            | vars(test.difference.interval)
            | {"p_value": test.difference.p_value, "corrected_p_value": test.difference.corrected_p_value}
            for test in tests
        ]
        entry = {"metric": METRIC, "rule": RULE, "tests": entries, **provenance}
        write_measurements(file, comparisons=comparisons | {study.name: entry})
    return [f"{len(missing)} runs have no captions with these scores, such as {missing[0]}"] if missing else []


def _by_seed(study: Study, scores: Mapping[str, Scores], variant: str, evaluation: str = "") -> dict[int, Scores]:
    names = {seed: score_name(variant, seed, evaluation) for seed in study.seeds}
    return {seed: scores[name] for seed, name in names.items() if name in scores}


def _group(study: Study, variant: str, scores: Mapping[str, Scores]) -> Variant:
    """Return the runs of a variant that have scores, with the metrics that all of them have."""
    entries = _by_seed(study, scores, variant)
    values = [entry["values"] for entry in entries.values()]
    common = [key for key in COLUMNS if values and all(key in run for run in values)]
    runs = [f"{study.name}_{variant}_{seed}" for seed in entries]
    return Variant(variant, runs, list(map(str, entries)), {key: [run[key] for run in values] for key in common})


def _bleu_counts(groups: Sequence[Variant], runs: Path) -> tuple[dict[str, Floats], list[Path]]:
    """Return BLEU's counts (images, C) of the runs of variants with several seeds, and the runs without these captions.

    Raises:
        InputError: Runs were scored on different images.
    """
    counts: dict[str, Floats] = {}
    missing, images = [], None
    for group in groups:
        for name, bleu4 in zip(group.runs, group.metrics.get(METRIC, []), strict=True) if len(group.runs) > 1 else ():
            run = read_run(runs / name) if is_run_folder(runs / name) else None
            if run is None or not run.captions or abs(run.metrics.get(METRIC, -1) - bleu4) >= _ROUNDING:
                missing.append(runs / name)
                continue
            ordered = [image for _, image in sorted(run.captions.items())]
            image_counts = bleu_counts([image.words for image in ordered], [image.reference_words for image in ordered])
            counts[name] = np.asarray(image_counts, dtype=np.float64)
            images = images or set(run.captions)
            if set(run.captions) != images:
                raise InputError(f"{runs / name} was scored on other images than the runs before it; score it again")
    return counts, missing


def _tests(study: Study, groups: Sequence[Variant], counts: Mapping[str, Floats]) -> Iterator[VariantTest]:
    """Yield an uncorrected test of every pair of a variant and a reference that both have several seeds, once."""
    tested = {group.name: group for group in groups if len(group.runs) > 1 and counts.keys() >= set(group.runs)}
    for number, reference in enumerate(study.references):
        for name in tested if reference in tested else ():
            if name not in study.references[: number + 1]:
                pair = tested[reference], tested[name]
                first, second = (np.stack([counts[run] for run in group.runs]) for group in pair)
                paired = _pairs(study, *pair)
                (difference,) = seed_differences(
                    first, second, lambda summed: bleu_from_counts(summed)[..., 3], paired=paired
                )
                yield VariantTest(name, reference, difference, paired)


def _pairs(study: Study, reference: Variant, group: Variant) -> bool:
    related = study.starts_from(group.name, reference.name) or study.starts_from(reference.name, group.name)
    return related and group.seeds == reference.seeds


def _earlier_tests(comparison: Mapping[str, Any], study: Study, groups: Sequence[Variant]) -> Iterator[VariantTest]:
    """Yield the tests of the last report by today's rule whose variants still have these scores."""
    seeds = {group.name: list(map(int, group.seeds)) for group in groups}
    means = {group.name: group.mean(METRIC) for group in groups if group.runs}
    for entry in comparison.get("tests", []) if comparison.get("rule") == RULE else []:
        variant, reference = entry["variant"], entry["reference"]
        if {variant, reference} <= means.keys() and reference in study.references:
            interval = Interval(entry["value"], entry["low"], entry["high"])
            same_scores = abs(interval.value - (means[variant] - means[reference])) < _ROUNDING
            if same_scores and (entry["variant_seeds"], entry["reference_seeds"]) == (seeds[variant], seeds[reference]):
                difference = Difference(interval, entry["p_value"], entry["corrected_p_value"])
                yield VariantTest(variant, reference, difference, entry["paired"])


# The tables


def _tables(
    study: Study, groups: Sequence[Variant], scores: Mapping[str, Scores], tests: Sequence[VariantTest]
) -> Iterator[str]:
    """Yield three tables in Markdown: of the scores, of the training, and of the further evaluations."""
    columns = {key: column for key, column in COLUMNS.items() if any(key in group.metrics for group in groups)}
    references = [name for name in study.references if any(test.reference == name for test in tests)]
    difference_texts = {(test.variant, test.reference): _difference(test) for test in tests}
    measured = [entry for group in groups for entry in _by_seed(study, scores, group.name).values()]
    corner = "; ".join(dict.fromkeys(f"{entry['split']}, {entry['images']:,} images" for entry in measured))
    rows = [[corner, "seeds", *(title for title, _ in columns.values())]]
    rows[0] += [f"BLEU-4, difference from {study.label(name)}" for name in references]
    for group in groups:
        cells = [_spread(group.metrics.get(key, []), places) for key, (_, places) in columns.items()]
        differences = [difference_texts.get((group.name, name), "") for name in references]
        rows.append([study.label(group.name), ",".join(group.seeds), *cells, *differences])
    yield f"{_markdown(rows)}\n\n{_note(groups, tests)}"
    yield from _over_training(study, scores)
    names = list(dict.fromkeys(name for variant in study.variants.values() for name in variant.evaluations))
    rows = [["BLEU-4 by evaluation", "as above", *names]]
    for group in groups:
        if study.variants[group.name].evaluations:
            cells = [_evaluation(study, scores, group, name) for name in names]
            rows.append([study.label(group.name), _spread(group.metrics.get(METRIC, []), 2), *cells])
    if names:
        yield _markdown(rows)


def _over_training(study: Study, scores: Mapping[str, Scores]) -> Iterator[str]:
    """Yield the table of the statistics of training, if hard attention was trained by REINFORCE."""
    rows = [["While training", *TRAINING.values()]]
    for variant in study.variants:
        training = [entry.get("training", {}) for entry in _by_seed(study, scores, variant).values()]
        cells = []
        for name in TRAINING:
            curves = [run[name] for run in training if name in run]
            by_tenth = [[curve[tenth] for curve in curves if curve[tenth] is not None] for tenth in _SHOWN_TENTHS]
            texts = [f"{statistics.fmean(values):.2f}" if values else "-" for values in by_tenth]
            cells.append(", ".join(texts) if any(by_tenth) else "")
        if any(cells):
            rows.append([study.label(variant), *cells])
    if any(row[1 + list(TRAINING).index("baseline")] for row in rows[1:]):
        logged = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
        note = (
            "Means over seeds in the first and last tenth of the training. The return is that of the whole caption "
            "with a moving average, and of the words from the draw on otherwise."
        )
        yield f"{_markdown([[row[column] for column in logged] for row in rows])}\n\n{note}"


def _note(groups: Sequence[Variant], tests: Sequence[VariantTest]) -> str:
    note = "Mean (standard deviation) over seeds."
    if any(len(group.runs) == 1 for group in groups):
        note += f" Rows without a deviation have {ONE_SEED}."
    if tests:
        note += (
            " Differences: 95 % intervals over images and seeds, p-values corrected for the "
            f"{len(tests)} tests of the table (Holm). Bold: interval and test agree that there is a difference."
        )
    if any(test.paired for test in tests):
        note += " *Paired*: the runs of a seed are compared, because one of the two started from the other."
    return note


def _difference(test: VariantTest) -> str:
    text = change_text(test.difference)
    return (f"**{text}**" if test.difference.is_clear else text) + (", *paired*" if test.paired else "")


def _spread(values: Sequence[float], places: int) -> str:
    """Return the mean and the deviation of several seeds, the value of one seed, or nothing."""
    if not values:
        return ""
    deviation = f" ({np.std(values, ddof=1):.{places}f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{places}f}{deviation}"


def _evaluation(study: Study, scores: Mapping[str, Scores], group: Variant, evaluation: str) -> str:
    """Return the score of an evaluation, and its seeds if they are fewer than the variant's."""
    entries = _by_seed(study, scores, group.name, evaluation)
    text = _spread([entry["values"][METRIC] for entry in entries.values()], 2)
    partial_seeds = entries and list(map(str, entries)) != group.seeds
    return f"{text}, seed {', '.join(map(str, entries))}" if partial_seeds else text


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table, whose first row has the titles. An empty cell becomes a dash."""
    titles, *lines = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [titles, ["---"] * len(titles), *([cell or "-" for cell in line] for line in lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _insert(page: Path, name: str, text: str) -> None:
    """Replace the text between the study's two comments in a page. A missing page is created.

    Raises:
        InputError: The page has no place for the study.
    """
    begin, end = f"<!-- study {name} -->", "<!-- end -->"
    content = page.read_text(encoding="utf-8") if page.exists() else f"{begin}\n{end}\n"
    before, begun, rest = content.partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise InputError(f"--report {page}: has no place for the study; add two lines, {begin} and {end}")
    write_text(page, f"{before}{begin}\n{text}\n\n{end}{after}")
