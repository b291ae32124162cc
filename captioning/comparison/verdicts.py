"""The verdicts of a comparison: sentences on each run or variant, which begin with what was found."""

from __future__ import annotations

from collections.abc import Mapping

from captioning.comparison.result import Comparison, p_text
from captioning.evaluation.resampling import Difference

ONE_SEED = "one seed each, which says nothing about the method"
"""What every verdict over runs of one seed each says, since other seeds could order the methods differently."""

_HALF_A_DIGIT = 0.05  # verdicts show a smaller difference as 0.0


def add_verdicts(result: Comparison, titles: Mapping[str, str]) -> None:
    """Add a verdict on every variant and every run that is tested against the first.

    Args:
        result: The comparison with its scores and tests.
        titles: The names of the measures in print.
    """
    metric, title = result.metric, titles.get(result.metric, "")
    groups = {group.name: group for group in result.groups}
    for name, tests in result.group_tests.items():
        first, other = result.groups[0], groups[name]
        counts = len(other.runs), len(first.runs)
        seeds = f"{counts[0]} seeds each" if counts[0] == counts[1] else "{} and {} seeds".format(*counts)
        before, after = first.mean(metric), other.mean(metric)
        result.verdicts[name] = _verdict(
            first.name, before, name, after, tests[metric], title, f"{result.images} images, {seeds}"
        )
    for name, tests in result.tests.items():
        first_run = result.runs[0]
        before, after = (result.scores[run][metric].value for run in (first_run, name))
        result.verdicts[name] = _verdict(
            first_run, before, name, after, tests[metric], title, f"{result.images} images, {ONE_SEED}"
        )


def _verdict(first: str, before: float, other: str, after: float, test: Difference, title: str, over: str) -> str:
    change = test.interval
    difference = f"{change.value:+.1f}, {change.low:+.1f} to {change.high:+.1f}, {p_text(test.corrected)}"
    measured = f"{title} ({difference}), {over}."
    if abs(change.value) < _HALF_A_DIGIT and not test.excludes_zero and f"{after:.1f}" == f"{before:.1f}":
        return f"Equal: {other} and {first} both have {after:.1f} {measured}"
    return f"{finding(test)}: {other} has {after:.1f} and {first} {before:.1f} {measured}"


def finding(test: Difference) -> str:
    """Return whether there is a difference, which is clear only where interval and test agree."""
    if test.clear:
        return "Clear difference"
    if test.excludes_zero:
        return "Weak evidence of a difference (the interval excludes zero, the test is not significant)"
    if test.significant:
        return "Weak evidence of a difference (the test is significant, the interval includes zero)"
    return "No clear difference"
