"""The verdicts of a comparison: sentences on each run or variant, which begin with what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from captioning.comparison.formats import p_text
from captioning.comparison.result import Comparison
from captioning.evaluation.resampling import Difference, holm

ONE_SEED = "one seed each, which says nothing about the method"
"""What every verdict over runs of one seed each says, since other seeds could order the methods differently."""

_HALF_A_DIGIT = 0.05  # verdicts show a smaller difference as 0.0


@dataclass(frozen=True, eq=False)
class _Pair:
    """Two runs or two variants.

    Attributes:
        first: The name of the one that all others are compared with.
        other: The name of the other.
        before: Scores of the first in percent, by measure.
        after: Scores of the other.
        tests: By measure, how much higher the other scores.
        over: The images and the seeds of the tests.
    """

    first: str
    other: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    tests: Mapping[str, Difference]
    over: str


def add_verdicts(result: Comparison, titles: Mapping[str, str]) -> None:
    """Add a verdict on every variant and every run that is tested against the first.

    Args:
        result: The comparison with its scores and tests.
        titles: The names of the measures in print.
    """
    for pairs in (_variants(result), _runs(result)):
        for pair, chosen in zip(pairs, _chosen(pairs), strict=True):
            verdict = _verdict(pair, result.metric, titles)
            if chosen is not None and chosen[0] != result.metric:
                verdict += f" {_most_decisive(pair, *chosen, titles, sum(len(each.tests) for each in pairs))}"
            result.verdicts[pair.other] = verdict


def _variants(result: Comparison) -> list[_Pair]:
    groups = {group.name: group for group in result.groups}
    means = {name: {key: group.mean(key) for key in group.scores} for name, group in groups.items()}
    pairs = []
    for name, tests in result.group_tests.items():
        first = result.groups[0]
        counts = len(groups[name].runs), len(first.runs)
        seeds = f"{counts[0]} seeds each" if counts[0] == counts[1] else "{} and {} seeds".format(*counts)
        over = f"{result.images} images, {seeds}"
        pairs.append(_Pair(first.name, name, means[first.name], means[name], tests, over))
    return pairs


def _runs(result: Comparison) -> list[_Pair]:
    first, over = result.runs[0], f"{result.images} images, {ONE_SEED}"
    scores = {run: {key: of.value for key, of in intervals.items()} for run, intervals in result.scores.items()}
    return [_Pair(first, run, scores[first], scores[run], tests, over) for run, tests in result.tests.items()]


def _verdict(pair: _Pair, metric: str, titles: Mapping[str, str]) -> str:
    test, before, after = pair.tests[metric], pair.before[metric], pair.after[metric]
    change = f"{titles[metric]} ({_change(test)}), {pair.over}."
    if abs(test.interval.value) < _HALF_A_DIGIT and not test.excludes_zero and f"{after:.1f}" == f"{before:.1f}":
        return f"Equal: {pair.other} and {pair.first} both have {after:.1f} {change}"
    return f"{finding(test)}: {pair.other} has {after:.1f} and {pair.first} {before:.1f} {change}"


def finding(test: Difference) -> str:
    """Return whether there is a difference, which is clear only where interval and test agree."""
    if test.clear:
        return "Clear difference"
    if test.excludes_zero:
        return "Weak evidence of a difference (the interval excludes zero, the test is not significant)"
    if test.significant:
        return "Weak evidence of a difference (the test is significant, the interval includes zero)"
    return "No clear difference"


def _chosen(pairs: Sequence[_Pair]) -> list[tuple[str, Difference] | None]:
    """Return the most decisive measure of each pair, with its test corrected for all tests that it is chosen from.

    It is the clear difference with the least p-value; of equals, the one that is farthest from zero in widths of its
    interval. None if no difference is clear.
    """
    corrected = iter(holm([test for pair in pairs for test in pair.tests.values()]))
    chosen = []
    for pair in pairs:
        clear = {key: test for key, test in zip(pair.tests, corrected, strict=False) if test.clear}
        chosen.append(min(clear.items(), key=lambda item: _rank(item[1]), default=None))
    return chosen


def _rank(test: Difference) -> tuple[float, float]:
    width = test.interval.high - test.interval.low
    return test.corrected, -abs(test.interval.value) / max(width, 1e-9)


def _most_decisive(pair: _Pair, key: str, test: Difference, titles: Mapping[str, str], tests: int) -> str:
    scores = f"{titles[key]}, {pair.after[key]:.1f} and {pair.before[key]:.1f}"
    return f"Most decisive of {tests} tests, and corrected for them: {scores} ({_change(test)})."


def _change(test: Difference) -> str:
    change = test.interval
    return f"{change.value:+.1f}, {change.low:+.1f} to {change.high:+.1f}, {p_text(test.corrected)}"
