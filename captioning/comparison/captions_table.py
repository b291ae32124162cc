"""How well runs caption the same images: every score with its interval and test; where they disagree most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from captioning.comparison.formats import measured_cell, p_text, plain_cell, range_text, with_best
from captioning.comparison.result import Comparison, Disagreement, Row, Table
from captioning.comparison.scored import CORRECTED, Scored, add_tests
from captioning.evaluation.records import CaptionedImage
from captioning.evaluation.resampling import Difference, Floats
from captioning.evaluation.scores import NAMES, TITLES, Family, count

ONE_SEED = "one seed each: says nothing of the method"
"""What every verdict over runs of one seed each says, since other seeds could order the methods differently."""


def counts_of(captions: dict[int, CaptionedImage], ids: Sequence[int], java: bool) -> list[tuple[Family, Floats]]:
    hypotheses, references = [captions[i].words for i in ids], [captions[i].reference_words for i in ids]
    return count(hypotheses, references, java=java)


def names_of(families: Sequence[tuple[Family, Floats]]) -> set[str]:
    return {name for family, _ in families for name in family.names}


def compare_captions(result: Comparison, scored: Scored, counted: dict[str, list[tuple[Family, Floats]]]) -> None:
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
    for name in scored.compared:
        others = {family.names: counts for family, counts in counted[name]}
        for family, counts in counted[first]:
            if family.names in others:
                found = scored.differences(counts, others[family.names], family.scores)
                tests |= {(name, metric): test for metric, test in zip(family.names, found, strict=True)}
    if tests:
        add_tests(result, tests, scored.resamples)
        result.verdicts = {name: _verdict(result, first, name) for name in result.tests}
    rows = []
    for metric in [name for name in NAMES if name in result.scores[first]]:
        cells = [
            measured_cell(result.scores.get(run, {}).get(metric), result.tests.get(run, {}).get(metric))
            for run in result.runs
        ]
        rows.append(Row(TITLES[metric], with_best(cells, max) if scored.common else cells))
    lengths = [_length_ratio(counted[run][0][1]) if run in counted else None for run in result.runs]
    rows.append(Row("Length, words per reference word", [plain_cell(value, "{:.3f}") for value in lengths]))
    images = f"{result.images} images" if scored.common else "each run's own images"
    result.tables.append(
        Table(
            f"Captions of {images}",
            rows,
            "Percent; BLEU with brevity penalty, CIDEr-D times 100. Below each score its 95 % interval (bootstrap over "
            "images) and the difference from the first run with its 95 % interval (paired bootstrap) and p-value "
            f"(randomization test), {scored.resamples} resamples. They reflect the choice of images, not that of the "
            "training seed." + CORRECTED * bool(tests),
        )
    )


def _verdict(result: Comparison, first: str, run: str) -> str:
    metric = result.metric
    before, after = (result.scores[name][metric].value for name in (first, run))
    test, title = result.tests[run][metric], TITLES[metric]
    change = test.interval
    if change.value == 0 and test.p_value == 1:
        return f"{run} and {first} have the same {title}, {after:.2f}, on {result.images} images; {ONE_SEED}."
    than = "higher" if change.value > 0 else "lower"
    return (
        f"{run} scores {title} {after:.2f}, {abs(change.value):.2f} {than} than {first} ({before:.2f}) on "
        f"{result.images} images: {finding(test)}; {ONE_SEED}."
    )


def finding(test: Difference) -> str:
    """Return whether there is a difference, which interval and test must agree on, with both."""
    if test.clear:
        found = "a clear difference"
    elif test.excludes_zero:
        found = "the evidence is weak, since the interval excludes zero but the test is not significant"
    elif test.significant:
        found = "the evidence is weak, since the test is significant but the interval includes zero"
    else:
        found = "no clear difference"
    return f"{found} (95 % interval {range_text(test.interval, signed=True)}, corrected {p_text(test.corrected)})"


def _length_ratio(counts: Floats) -> float:
    hypothesis, reference = counts[:, -2:].sum(axis=0)
    return float(hypothesis / reference) if reference else math.nan


def disagreements(
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
