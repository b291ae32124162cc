"""The tables of a study as Markdown, made from the files of its scores and the captions in its run folders."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from captioning.comparison.formats import p_text, range_text
from captioning.comparison.runs import read_run
from captioning.comparison.study import Study
from captioning.errors import InputError
from captioning.evaluation.bleu import bleu_counts, bleu_from_counts
from captioning.evaluation.records import CaptionedImage, read_captions, read_scores
from captioning.evaluation.resampling import Difference, Floats, Interval, holm
from captioning.evaluation.seeds import LEAST_PAIRS, seed_differences
from captioning.files import read_json, write_json, write_text

_RESAMPLES = 10_000
_COLUMNS = {  # title -> (score, decimals); one that some of a variant's seeds lack is left out of its row
    "BLEU-1": ("bleu1", 2),
    "BLEU-2": ("bleu2", 2),
    "BLEU-3": ("bleu3", 2),
    "BLEU-4": ("bleu4", 2),
    "ROUGE-L": ("rouge_l", 2),
    "METEOR": ("meteor", 2),
    "CIDEr-D": ("cider_d", 2),
    "NLL": ("nll", 3),
    "pointing": ("pointing_accuracy", 1),
    "posterior pointing": ("posterior_pointing_accuracy", 1),
}
_CURVE = "val/bleu4"
_ROUNDING = 0.01  # by how much scores may differ that are the same


@dataclass(frozen=True)
class Measured:
    """What was measured of a study.

    Attributes:
        runs: by variant and seed, the content of the file.
        evaluations: by variant, evaluation and seed.
    """

    runs: dict[str, dict[int, dict[str, Any]]]
    evaluations: dict[str, dict[str, dict[int, dict[str, Any]]]]

    def values(self, variant: str, score: str) -> list[float]:
        """The score of every seed; [] if one lacks it."""
        runs = self.runs[variant].values()
        return [run["values"][score] for run in runs] if all(score in run["values"] for run in runs) else []


@dataclass(frozen=True)
class VariantTest:
    """How much higher the mean BLEU-4 of a variant is than that of a reference, over images and seeds."""

    variant: str
    reference: str
    variant_seeds: list[int]
    reference_seeds: list[int]
    images: int
    difference: Difference
    paired: bool = False
    """Every run of the variant goes on from the reference's run of the same seed."""

    def to_dict(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        test = found.pop("difference")
        return found | test["interval"] | {"p_value": test["p_value"], "corrected_p_value": test["corrected"]}


def read_measurements(study: Study, folder: Path) -> Measured:
    """Read the files of a study's scores that are there.

    Raises:
        InputError: one is damaged.
    """
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    evaluations: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}
    for variant in study.variants.values():
        for seed in study.seeds:
            path = folder / f"{study.run_name(variant.name, seed)}.json"
            if not path.is_file():
                continue
            runs.setdefault(variant.name, {})[seed] = _read(path)
            for name in variant.evaluations:
                path = folder / f"{study.run_name(variant.name, seed, name)}.json"
                if path.is_file():
                    evaluations.setdefault(variant.name, {}).setdefault(name, {})[seed] = _read(path)
    return Measured(runs, evaluations)


def _read(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict) or "bleu4" not in (content.get("values") or {}):
        raise InputError(f"{path}: not what scripts/evaluate.py --measurement writes; delete it to score the run again")
    return content


def add_speed(measurement: Path, folder: Path) -> None:
    """Add to a run's scores how fast it was trained, as far as its folder says."""
    if not measurement.is_file() or not folder.is_dir():
        return
    content, run = _read(measurement), read_run(folder)
    speed = run.captions_per_second
    if "training" in content or speed is None or not _is_measured(folder, content):
        return
    training = {"captions_per_second": round(speed, 1)}
    batch = (run.settings.get("data") or {}).get("batch_size")
    if isinstance(batch, int):
        training["seconds_per_step"] = round(batch / speed, 4)
    write_json(measurement, content | {"training": training})


def _is_measured(folder: Path, content: Mapping[str, Any]) -> bool:
    """Whether the captions in a run's folder are those whose scores these are."""
    scores = folder / "test_metrics.json"
    if not scores.is_file() or not (folder / "test_captions.json").is_file():
        return False
    found = read_scores(scores)[0]
    return abs(found.get("bleu4", -1) - content["values"]["bleu4"]) < _ROUNDING


def compare_variants(
    study: Study, measured: Measured, runs: Path, earlier: Path
) -> tuple[list[VariantTest], list[str]]:
    """Return the tests of every variant against every reference, and sentences on what could not be tested.

    Args:
        runs: the folder of the runs; a test whose captions are not there is taken from ``earlier``.
        earlier: the file that these tests were written to before, if it is there.

    Raises:
        InputError: runs were scored on different images, or a file is damaged.
    """
    counts, images, notices = _counts_of_variants(study, measured, runs)
    known = {(test.variant, test.reference): test for test in _earlier(earlier)}
    tests = []
    for number, reference in enumerate(study.references):
        for variant in measured.runs:
            if variant in study.references[: number + 1] or reference not in measured.runs:
                continue  # the other way round, this pair is tested already
            seeds = (list(measured.runs[variant]), list(measured.runs[reference]))
            if variant in counts and reference in counts:
                paired = (
                    study.goes_on_from(variant, reference) and seeds[0] == seeds[1] and len(seeds[0]) >= LEAST_PAIRS
                )
                (found,) = seed_differences(
                    counts[reference], counts[variant], _bleu4, paired=paired, resamples=_RESAMPLES
                )
                tests.append(VariantTest(variant, reference, *seeds, images, found, paired))
            elif (before := known.get((variant, reference))) is not None:
                means = [statistics.fmean(measured.values(name, "bleu4")) for name in (variant, reference)]
                unchanged = abs(before.difference.interval.value - (means[0] - means[1])) < _ROUNDING
                if unchanged and (before.variant_seeds, before.reference_seeds) == seeds:
                    tests.append(before)
    corrected = holm([test.difference for test in tests])
    return [dataclasses.replace(test, difference=d) for test, d in zip(tests, corrected, strict=True)], notices


def _counts_of_variants(study: Study, measured: Measured, runs: Path) -> tuple[dict[str, Floats], int, list[str]]:
    """Return BLEU's counts (seeds, images, C) of every variant of several seeds, the number of images, and notices."""
    captions: dict[str, list[dict[int, CaptionedImage]]] = {}
    first: tuple[Path, set[int]] | None = None
    notices = []
    for variant, of_seed in measured.runs.items():
        folders = {seed: runs / study.run_name(variant, seed) for seed in of_seed}
        missing = [folder for seed, folder in folders.items() if not _is_measured(folder, of_seed[seed])]
        if missing:
            notices.append(
                f"{', '.join(map(str, missing))}: without the captions that were scored; to make them again, delete "
                "the runs' files of scores and run the study"
            )
            continue
        for folder in folders.values() if len(of_seed) > 1 else ():
            found = read_captions(folder / "test_captions.json")
            first = first or (folder, set(found))
            if set(found) != first[1]:
                raise InputError(f"{folder} and {first[0]} were scored on different images; score one of them again")
            captions.setdefault(variant, []).append(found)
    counts = {variant: np.stack([_bleu_counts(run) for run in found]) for variant, found in captions.items()}
    return counts, len(first[1]) if first else 0, notices


def _bleu_counts(captions: Mapping[int, CaptionedImage]) -> Floats:
    ordered = [captions[i] for i in sorted(captions)]
    counts = bleu_counts([image.words for image in ordered], [image.reference_words for image in ordered])
    return np.asarray(counts, dtype=np.float64)


def _bleu4(counts: Floats) -> Floats:
    return np.asarray(bleu_from_counts(counts)[..., 3])


def mean_curves(study: Study, measured: Measured, runs: Path, earlier: Path) -> dict[str, list[float]]:
    """Return BLEU-4 of every validation in training, the mean over a variant's seeds.

    Args:
        runs: the folder of the runs; of a variant without one of its folders the curve is taken from ``earlier``.
    """
    known = read_json(earlier).get("curves", {}) if earlier.is_file() else {}
    found = {}
    for variant, of_seed in measured.runs.items():
        folders = [runs / study.run_name(variant, seed) for seed in of_seed]
        curves: list[list[float]] = []
        if all(_is_measured(folder, of_seed[seed]) for seed, folder in zip(of_seed, folders, strict=True)):
            curves = [[value for _, value in read_run(folder).curves.get(_CURVE, [])] for folder in folders]
        if curves and all(curves):
            # Of seeds that stopped at different epochs, as far as all of them went.
            found[variant] = [round(statistics.fmean(values), 4) for values in zip(*curves, strict=False)]
        elif variant in known:
            found[variant] = known[variant]
    return found


def _earlier(path: Path) -> list[VariantTest]:
    if not path.is_file():
        return []
    try:
        found = []
        for entry in read_json(path)["tests"]:
            interval = Interval(*(entry.pop(name) for name in ("value", "low", "high")))
            difference = Difference(interval, entry.pop("p_value"), entry.pop("corrected_p_value"))
            found.append(VariantTest(difference=difference, **entry))
        return found
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not what a study writes; delete it") from error


def markdown(
    study: Study,
    measured: Measured,
    tests: Sequence[VariantTest],
    curves: Mapping[str, Sequence[float]],
    command: str,
) -> str:
    """Return the study's tables, and what is not measured yet."""
    variants = [variant for name, variant in study.variants.items() if name in measured.runs]
    parts = [f"Made by `{command}`."]
    if variants:
        columns = {
            title: column
            for title, column in _COLUMNS.items()
            if any(measured.values(variant.name, column[0]) for variant in variants)
        }
        rows = []
        for variant in variants:
            runs = measured.runs[variant.name]
            speeds = [run["training"]["captions_per_second"] for run in runs.values() if "training" in run]
            row = [variant.label, ", ".join(map(str, runs))]
            row += [_spread(measured.values(variant.name, score), places) for score, places in columns.values()]
            rows.append([*row, f"{statistics.median(speeds):.0f}" if speeds else ""])
        first = next(iter(measured.runs[variants[0].name].values()))
        split = {"val": "validation"}.get(first.get("split", ""), first.get("split", ""))
        what = f"{split}, {first.get('images', 0):,} images, mean (standard deviation) over seeds"
        parts.append(_table([what, "seeds", *columns, "captions/s in training"], rows))
        parts.append(
            f"Files `{study.runs}_VARIANT_SEED.json`, VARIANT {', '.join(v.name for v in variants)} in turn. Captions "
            f"per second: the median of what the runs logged, with what else the machine did ({_machines(measured)})."
        )
    references = [name for name in study.references if any(test.reference == name for test in tests)]
    paired = any(test.paired for test in tests)
    if references:
        rows = [
            [variant.label, *(_difference(tests, variant.name, reference) for reference in references)]
            for variant in variants
            if any(test.variant == variant.name for test in tests)
        ]
        parts.append(_table(["BLEU-4, difference from", *(study.variants[name].label for name in references)], rows))
        parts.append(
            "In parentheses the 95 % interval, over images and seeds at once (`captioning/evaluation/seeds.py` has the "
            f"method and its source); the p-values are corrected for the {len(tests)} tests of this table (Holm), the "
            f"intervals are not. Bold: interval and test agree that there is a difference. File "
            f"`{study.name}_comparison.json`."
            + (" *Paired*: runs that go on from the reference's of the same seed, each compared with it." * paired)
        )
    evaluations = list(dict.fromkeys(name for found in measured.evaluations.values() for name in found))
    if evaluations:
        rows = []
        for variant in variants:
            runs = measured.runs[variant.name]
            found = measured.evaluations.get(variant.name, {})
            cells = [_bleu4_of(found.get(name, {})) for name in evaluations]
            for cell, name in enumerate(evaluations):  # a mean over fewer seeds than beside it says so
                if (seeds := list(found.get(name, {}))) and seeds != list(runs):
                    cells[cell] += f", seed {', '.join(map(str, seeds))}"
            if found:
                rows.append([variant.label, _bleu4_of(runs), *cells])
        parts.append(_table(["BLEU-4 by evaluation", "as above", *evaluations], rows))
        parts.append(f"Files `{study.runs}_VARIANT_SEED_EVALUATION.json`.")
    if rows := [[v.label, *(f"{value:.2f}" for value in curves[v.name])] for v in variants if v.name in curves]:
        most = max(map(len, rows))
        header = ["BLEU-4 of the validations in training, mean over seeds", *map(str, range(1, most))]
        parts.append(_table(header, [[*row, *[""] * (most - len(row))] for row in rows]))
        parts.append(f"From the runs' own logs, kept in `{study.name}_comparison.json`.")
    if missing := _missing(study, measured):
        parts.append(f"Not yet measured: {'; '.join(missing)}.")
    return "\n\n".join(parts)


def _machines(measured: Measured) -> str:
    """Return the processors of a study's runs."""
    machines = [run.get("machine", {}) for runs in measured.runs.values() for run in runs.values()]
    named = [f"{machine['processor']}, {machine['cores']} cores" for machine in machines if "processor" in machine]
    return " or ".join(dict.fromkeys(named)) or "machine not known"


def _missing(study: Study, measured: Measured) -> list[str]:
    found = []
    for variant in study.variants.values():
        runs = measured.runs.get(variant.name, {})
        if not runs:
            found.append(variant.label)
            continue
        if seeds := [str(seed) for seed in study.seeds if seed not in runs]:
            found.append(f"{variant.label} (seed {', '.join(seeds)})")
        for name in variant.evaluations:
            done = measured.evaluations.get(variant.name, {}).get(name, {})
            if seeds := [str(seed) for seed in runs if seed not in done]:
                found.append(f"{variant.label} ({name}, seed {', '.join(seeds)})")
    return found


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _spread(values: Sequence[float], places: int) -> str:
    if not values:
        return ""
    deviation = f" ({statistics.stdev(values):.{places}f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{places}f}{deviation}"


def _bleu4_of(runs: Mapping[int, Mapping[str, Any]]) -> str:
    return _spread([run["values"]["bleu4"] for run in runs.values()], 2)


def _difference(tests: Sequence[VariantTest], variant: str, reference: str) -> str:
    for test in tests:
        if (test.variant, test.reference) == (variant, reference):
            found = test.difference
            change = f"{found.interval.value:+.2f}"
            change = f"**{change}**" if found.clear else change
            return f"{change} ({range_text(found.interval, signed=True)}), {p_text(found.corrected)}" + (
                ", *paired*" * test.paired
            )
    return ""


def insert(page: Path, name: str, text: str) -> None:
    """Replace what stands in a page between the study's two comments.

    Raises:
        InputError: the page cannot be read or has no place for the study.
    """
    begin, end = f"<!-- study {name} -->", "<!-- end -->"
    try:
        content = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--report {page}: cannot be read ({error})") from error
    before, found, rest = content.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise InputError(f"--report {page}: has no place for the study; add two lines, {begin} and {end}")
    write_text(page, f"{before}{begin}\n{text}\n{end}{after}", "--report")
