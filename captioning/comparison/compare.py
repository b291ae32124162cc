"""How runs differ: scores on the same images with their uncertainty, curves, speed, size and settings.

``compare`` takes ``runs.Run`` and returns ``result.Comparison``: rows of text for a terminal, a page or a
report, and the numbers behind them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from captioning.comparison.result import Cell, Comparison, Disagreement, Row, Table
from captioning.comparison.runs import Curve, Run, flat
from captioning.errors import InputError
from captioning.evaluation.records import CaptionedImage
from captioning.evaluation.resampling import (
    LEVEL,
    Difference,
    Floats,
    Interval,
    Score,
    differences,
    holm,
    intervals,
    share,
)
from captioning.evaluation.scores import FAMILIES, NAMES, TITLES, Family, count

# Row title -> the field of a noun's judgement whose mean it is, and whether it is the run's own score: the others are
# what attention that ignores the caption would score at the same nouns.
_GROUNDING = {
    "Pointing accuracy": ("hit", True),
    "by chance": ("chance", False),
    "always the centre": ("centre_hit", False),
    "Attention correctness": ("correctness", True),
    "spread evenly": ("uniform", False),
    "around the centre": ("centre", False),
}
_CORRECTED = " The p-values are corrected for the number of tests in this table (Holm); the intervals are not."
_LOWER_IS_BETTER = ("nll", "loss")
# Settings of where a run is stored, and those that its wandb config repeats under short names.
_ELSEWHERE = (
    "name runs results config ckpt_path trainer.default_root_dir trainer.logger checkpoint.dirpath last.dirpath "
    "_wandb attention score encoder seed provenance"
).split()


def compare(
    runs: Sequence[Run],
    *,
    metric: str = "bleu4",
    resamples: int = 1000,
    seed: int = 0,
    images: int = 12,
    java: bool = False,
) -> Comparison:
    """Compare runs with the first of them.

    Args:
        runs: two or more, with different names.
        metric: one of ``evaluation.scores.NAMES``, for the verdict and for the scores of single images.
        resamples: of the images, for every interval and every test.
        seed: of the resampling.
        images: how many disagreements to list.
        java: also METEOR and SPICE, where they are available.

    Raises:
        InputError: ``metric`` is not available.
    """
    result = Comparison([run.name for run in runs], metric)
    tested = {run.name: run.captions for run in runs if run.captions}
    for run in runs:
        if not run.captions:
            result.notices.append(_untested(run))
    common = _common_images(tested, result)
    scored = _Scored(tested, common, resamples, seed)
    counted = {name: _counts(captions, ids, java) for name, captions, ids in scored.images()}
    if any(metric not in _names(families) for families in counted.values()):
        missing = next(family.missing for family in FAMILIES if metric in family.names)
        reason = missing() if java and missing is not None else None
        raise InputError(f"metric: {TITLES[metric]} cannot be computed here" + (f" ({reason})" if reason else ""))
    _compare_captions(result, scored, counted)
    _compare_grounding(result, scored)
    _add_training(result, runs)
    _add_conditions(result, runs)
    result.settings = _settings(runs)
    result.curves = _curves(runs, metric)
    if common and len(tested) > 1:
        result.disagreements = _disagreements(tested, counted, common, metric, images)
    return result


def _untested(run: Run) -> str:
    if run.how_to_test:
        return f"{run.name} has no captions of its test split; to make them: {run.how_to_test}"
    return f"{run.name} has no captions of its test split, and no checkpoint to make them with"


def _common_images(tested: dict[str, dict[int, CaptionedImage]], result: Comparison) -> list[int]:
    """Return the ids of the images that all tested runs captioned, with a notice where they are not all images."""
    if not tested:
        return []
    first, *others = tested.values()
    shared = sorted(set(first).intersection(*others))
    # An id alone does not make an image: another data set has other references under the same number.
    common = [i for i in shared if all(set(first[i].references) & set(run[i].references) for run in others)]
    if any(len(run) != len(common) for run in tested.values()):
        sizes = ", ".join(f"{name} {len(run)}" for name, run in tested.items())
        if common:
            result.notices.append(
                f"The runs were evaluated on different images ({sizes}); compared on the {len(common)} in common."
            )
        else:
            result.notices.append(
                f"The runs have no image in common ({sizes}): each is scored on its own images, and no test is made."
            )
    changed = sum(any(run[i].references != first[i].references for run in others) for i in common)
    if changed:
        result.notices.append(
            f"The references of {changed} common images differ between the runs (another tokenisation?); "
            "each run is scored with its own."
        )
    result.images = len(common)
    return common


@dataclass(frozen=True)
class _Scored:
    """What the tested runs are scored on, and how it is resampled for every interval and test.

    Attributes:
        captions: by run and image id.
        common: ids of the images that all runs captioned; if there are none, a run is scored on its own images.
    """

    captions: dict[str, dict[int, CaptionedImage]]
    common: list[int]
    resamples: int
    seed: int

    def images(self) -> Iterator[tuple[str, dict[int, CaptionedImage], list[int]]]:
        """Yield the name, the captions and the ids of the scored images of every run."""
        return ((name, captions, self.common or sorted(captions)) for name, captions in self.captions.items())

    def intervals(self, counts: Floats, score: Score) -> list[Interval]:
        """Return one interval for each score of ``score``."""
        found = intervals(counts, score, resamples=self.resamples, seed=self.seed)
        return [Interval(*(float(value) for value in column)) for column in found.reshape(3, -1).T]

    def differences(self, first: Floats, second: Floats, score: Score) -> list[Difference]:
        return differences(first, second, score, resamples=self.resamples, seed=self.seed)


def _counts(captions: dict[int, CaptionedImage], ids: Sequence[int], java: bool) -> list[tuple[Family, Floats]]:
    hypotheses, references = [captions[i].words for i in ids], [captions[i].reference_words for i in ids]
    return count(hypotheses, references, java=java)


def _names(families: Sequence[tuple[Family, Floats]]) -> set[str]:
    return {name for family, _ in families for name in family.names}


def _compare_captions(result: Comparison, scored: _Scored, counted: dict[str, list[tuple[Family, Floats]]]) -> None:
    if not counted:
        return
    for name, families in counted.items():
        result.scores[name] = {
            metric: interval
            for family, counts in families
            for metric, interval in zip(family.names, scored.intervals(counts, family.scores), strict=True)
        }
    first = next(iter(counted))
    tests: dict[tuple[str, str], Difference] = {}
    if scored.common and first == result.runs[0]:
        for name in list(counted)[1:]:
            others = {family.names: counts for family, counts in counted[name]}
            for family, counts in counted[first]:
                if family.names in others:
                    found = scored.differences(counts, others[family.names], family.scores)
                    tests |= {(name, metric): test for metric, test in zip(family.names, found, strict=True)}
        _add_tests(result, tests, scored.resamples)
        result.verdicts = {name: _verdict(result, first, name) for name in result.tests}
    rows = []
    for metric in [name for name in NAMES if name in result.scores[first]]:
        cells = [
            _measured(result.scores.get(run, {}).get(metric), result.tests.get(run, {}).get(metric))
            for run in result.runs
        ]
        rows.append(Row(TITLES[metric], _with_best(cells, max) if scored.common else cells))
    lengths = [_length_ratio(counted[run][0][1]) if run in counted else None for run in result.runs]
    rows.append(Row("Length, words per reference word", [_plain(value, "{:.3f}") for value in lengths]))
    images = f"{result.images} images" if scored.common else "each run's own images"
    result.tables.append(
        Table(
            f"Captions of {images}",
            rows,
            "Percent; BLEU with brevity penalty, CIDEr-D times 100. Below each score its 95 % interval (bootstrap over "
            "images) and the difference from the first run with its 95 % interval (paired bootstrap) and p-value "
            f"(randomization test), {scored.resamples} resamples. They reflect the choice of images, not that of the "
            "training seed." + _CORRECTED * bool(tests),
        )
    )


def _add_tests(result: Comparison, tests: dict[tuple[str, str], Difference], resamples: int) -> None:
    """Add the tests of one table, by run and measure, corrected for their number."""
    for (run, measure), corrected in zip(tests, holm(list(tests.values())), strict=True):
        result.tests.setdefault(run, {})[measure] = corrected
    if len(tests) / (resamples + 1) >= LEVEL:
        result.notices.append(
            f"{resamples} resamples are too few for {len(tests)} tests: no corrected p-value can be below {LEVEL}; "
            f"take at least {round(len(tests) / LEVEL)}."
        )


def _verdict(result: Comparison, first: str, other: str) -> str:
    metric = result.metric
    before, after = (result.scores[run][metric].value for run in (first, other))
    test, title = result.tests[other][metric], TITLES[metric]
    change = test.interval
    if change.value == 0 and test.p_value == 1:
        return f"{other} and {first} have the same {title}, {after:.2f}, on {result.images} images."
    than = "higher" if change.value > 0 else "lower"
    if test.clear:
        finding = "a clear difference"
    elif test.excludes_zero:
        finding = "the evidence is weak, since the interval excludes zero but the test is not significant"
    elif test.significant:
        finding = "the evidence is weak, since the test is significant but the interval includes zero"
    else:
        finding = "no clear difference"
    return (
        f"{other} scores {title} {after:.2f}, {abs(change.value):.2f} {than} than {first} ({before:.2f}) on "
        f"{result.images} images: {finding} (95 % interval {_range(change, signed=True)}, "
        f"corrected {_p(test.corrected)})."
    )


def _compare_grounding(result: Comparison, scored: _Scored) -> None:
    """Of generated captions with intervals and tests, and of references, whose nouns are the same for all runs."""
    first = result.runs[0]
    measured: dict[tuple[str, str, bool], dict[str, Floats]] = {}
    tests: dict[tuple[str, str], Difference] = {}
    for where, of in (("", "hits"), (", reference captions", "reference_hits")):
        for title, (column, own) in _GROUNDING.items():
            counts = {
                name: nouns
                for name, captions, ids in scored.images()
                if (nouns := _noun_counts(captions, ids, of, column)) is not None
            }
            if not counts:
                continue
            measured[title, where, own] = counts
            if own and scored.common and first in counts:
                for name in [name for name in counts if name != first]:
                    (tests[name, _key(title + where)],) = scored.differences(counts[first], counts[name], share)
    if not measured:
        return
    _add_tests(result, tests, scored.resamples)
    rows = []
    for (title, where, own), counts in measured.items():
        cells = []
        for run in result.runs:
            if run not in counts:
                cells.append(Cell(""))
            elif own:
                (interval,) = scored.intervals(counts[run], share)
                test = result.tests.get(run, {}).get(_key(title + where))
                cells.append(_measured(interval, test, of=f"{int(counts[run][:, 1].sum())} nouns"))
            else:
                cells.append(_plain(float(share(counts[run].sum(axis=0))), "{:.1f}"))
        name = title + (where if own else "")
        rows.append(Row(name, _with_best(cells, max) if own and scored.common else cells, baseline=not own))
    note = (
        "Over the nouns that name an object with a known mask, percent. Pointing accuracy: the strongest location "
        "touches the object; attention correctness: the share of attention on it. Beneath each: what attention "
        f"that ignores the caption gets at the same nouns.{_CORRECTED * bool(tests)}"
    )
    result.tables.append(Table("Grounding", rows, note))


def _noun_counts(captions: dict[int, CaptionedImage], ids: Sequence[int], of: str, column: str) -> Floats | None:
    """(images, 2): the sum over an image's nouns, and how many there are; None if there are none, or not this one."""
    judged = [[getattr(hit, column) for hit in getattr(captions[i], of)] for i in ids]
    if not any(judged) or any(value is None for values in judged for value in values):
        return None
    return np.array([[sum(map(float, values)), len(values)] for values in judged], dtype=np.float64)


def _length_ratio(counts: Floats) -> float:
    hypothesis, reference = counts[:, -2:].sum(axis=0)
    return float(hypothesis / reference) if reference else math.nan


def _add_training(result: Comparison, runs: Sequence[Run]) -> None:
    rows = []
    for key in (f"val/{result.metric}", "val/nll", "val/pointing_accuracy", "val/attention_correctness"):
        curves = [run.curves.get(key, []) for run in runs]
        if not any(curves):
            continue
        choose = min if key.endswith(_LOWER_IS_BETTER) else max
        best = [choose(curve, key=lambda point: point[1]) if curve else None for curve in curves]
        final = [curve[-1] if curve else None for curve in curves]
        for which, points in (("best", best), ("final", final)):
            cells = [
                Cell("") if point is None else Cell(f"{point[1]:.2f}", detail=f"step {point[0]:,}", value=point[1])
                for point in points
            ]
            rows.append(Row(f"{key} {which}", _with_best(cells, choose)))
    if rows:
        result.tables.append(Table("Validation", rows, "In training, after the optimizer step that is named."))


def _add_conditions(result: Comparison, runs: Sequence[Run]) -> None:
    speeds = [_plain(run.captions_per_second, "{:,.0f}") for run in runs]
    rows = [
        Row("Training, captions per second", _with_best(speeds, max)),
        Row("Training, time", [_duration(run.seconds) for run in runs]),
        *(
            Row(f"Parameters, {part}", [_plain(_part(run, part), "{:,.0f}") for run in runs])
            for part in ("decoder", "encoder")
        ),
        Row("Attention", [_attention(run) for run in runs]),
        Row("Context in the test", [_plain(run.search.get("inference"), "{}") for run in runs]),
        Row("Beam size in the test", [_plain(run.search.get("beam_size"), "{}") for run in runs]),
    ]
    rows = [row for row in rows if any(cell.text for cell in row.cells)]
    if rows:
        note = (
            "Captions per second: the median of what training logged, per process. Context: the expectation over "
            "locations (expected), the most probable one (argmax) or one drawn (sample)."
        )
        result.tables.append(Table("Speed, size and decoding", rows, note))


def _part(run: Run, part: str) -> int | None:
    return run.parameters.get(part) if run.parameters else None


def _attention(run: Run) -> Cell:
    settings = flat(run.settings)
    attention, score = (settings.get(f"model.decoder.attention{end}") for end in ("", ".score"))
    return Cell(str(attention or ""), detail=str(score or ""))


def _settings(runs: Sequence[Run]) -> Table:
    """The settings that differ among the runs whose settings are known."""
    known = {run.name: flat(run.settings) for run in runs if run.settings}
    rows = []
    for key in sorted({key for settings in known.values() for key in settings}):
        if any(key == other or key.startswith(f"{other}.") for other in _ELSEWHERE):
            continue
        values = [settings.get(key) for settings in known.values()]
        if any(value != values[0] for value in values):
            cells = [Cell(_shown(known.get(run.name, {}).get(key, ""))) for run in runs]
            rows.append(Row(key, cells))
    missing = [run.name for run in runs if run.name not in known]
    note = f"The settings of {', '.join(missing)} are not known." if missing else ""
    return Table("Settings that differ", rows, note)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _curves(runs: Sequence[Run], metric: str) -> dict[str, dict[str, Curve]]:
    """By log key, the validation metrics first."""
    leading = [f"val/{metric}", "val/nll", "val/pointing_accuracy", "val/attention_correctness", "train/loss"]
    keys = sorted({key for run in runs for key in run.curves if "/" in key and not key.endswith("_no_penalty")})
    ordered = [key for key in leading if key in keys] + [key for key in keys if key not in leading]
    found = {key: {run.name: run.curves[key] for run in runs if run.curves.get(key)} for key in ordered}
    return {key: curves for key, curves in found.items() if curves}


def _disagreements(
    tested: dict[str, dict[int, CaptionedImage]],
    counted: dict[str, list[tuple[Family, Floats]]],
    common: list[int],
    metric: str,
    images: int,
) -> list[Disagreement]:
    """The images with the largest difference of the captions' own scores; ties go to those with fewer common words."""
    scores = np.stack(
        [
            family.of_images(counts)[:, family.names.index(metric)]
            for families in counted.values()
            for family, counts in families
            if metric in family.names
        ]
    )
    spread = scores.max(axis=0) - scores.min(axis=0)
    distance = [_distance([captions[i].caption for captions in tested.values()]) for i in common]
    order = sorted(range(len(common)), key=lambda i: (-round(float(spread[i]), 9), -distance[i], common[i]))
    found = []
    for i in order[:images]:
        if not distance[i]:
            continue  # all captions are equal
        each = {name: captions[common[i]] for name, captions in tested.items()}
        found.append(
            Disagreement(
                image_id=common[i],
                captions={name: image.caption for name, image in each.items()},
                scores={name: float(score) for name, score in zip(tested, scores[:, i], strict=True)},
                references=next(iter(each.values())).references,
            )
        )
    return found


def _distance(captions: Iterable[str]) -> float:
    """0 for equal captions, up to 1 for captions without a common word; order counts a little."""
    captions = list(captions)
    words = [set(caption.split()) for caption in captions]
    union = set[str]().union(*words)
    if not union:
        return 0.0
    apart = 1 - len(set.intersection(*words)) / len(union)
    return apart or (0.0 if len(set(captions)) == 1 else 1e-3)


def _measured(interval: Interval | None, test: Difference | None, *, of: str = "") -> Cell:
    if interval is None:
        return Cell("")
    change, clear = "", False
    if test is not None:
        change = f"{test.interval.value:+.2f} ({_range(test.interval, signed=True)}), {_p(test.corrected)}"
        clear = test.clear
    detail = _range(interval) + (f", {of}" if of else "")
    return Cell(
        f"{interval.value:.2f}", detail, change, clear, value=interval.value, between=(interval.low, interval.high)
    )


def _plain(value: Any, shape: str) -> Cell:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return Cell("")
    return Cell(shape.format(value), value=float(value) if isinstance(value, (int, float)) else None)


def _with_best(cells: list[Cell], choose: Callable[[list[float]], float]) -> list[Cell]:
    """Mark the best cells as shown: equal texts are equally good. Nothing is best among equals or alone."""
    shown = {cell.text for cell in cells if cell.value is not None}
    if len(shown) < 2:
        return cells
    best = choose([cell.value for cell in cells if cell.value is not None])
    text = next(cell.text for cell in cells if cell.value == best)
    return [dataclasses.replace(cell, best=cell.text == text) for cell in cells]


def _duration(seconds: float | None) -> Cell:
    if seconds is None:
        return Cell("")
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
    return Cell(text, value=float(seconds))


def _range(interval: Interval, *, signed: bool = False) -> str:
    shape = "{:+.2f} to {:+.2f}" if signed else "{:.1f} to {:.1f}"
    return shape.format(interval.low, interval.high)


def _p(value: float) -> str:
    return f"p = {value:.3f}" if value >= 0.0015 else "p ≤ 0.001"


def _key(title: str) -> str:
    return title.lower().replace(",", "").replace(" ", "_")
