"""The verdicts of a comparison: one sentence for each run or variant, which begins with the finding."""

from __future__ import annotations

from captioning.comparison.result import Comparison, p_text
from captioning.metrics.resampling import Difference
from captioning.metrics.table import TITLES

ONE_SEED = "one seed each, so nothing follows about the method"
"""The end of every verdict over runs of one seed each: other seeds could order the methods differently."""


def verdicts(result: Comparison) -> dict[str, str]:
    """Return a verdict on every tested variant and run. Only verdicts over several seeds claim a difference."""
    single = {name: _on_run(result, name, tests[result.metric]) for name, tests in result.tests.items()}
    several = {name: _on_variant(result, name, tests[result.metric]) for name, tests in result.group_tests.items()}
    return several | single


def _difference(test: Difference) -> str:
    change = test.interval
    return f"({change.value:+.1f}, {change.low:+.1f} to {change.high:+.1f}, {p_text(test.corrected)})"


def _on_run(result: Comparison, name: str, test: Difference) -> str:
    after, before = (f"{run} {result.scores[run][result.metric].value:.1f}" for run in (name, result.runs[0]))
    on = f"on these {result.images} images {_difference(test)}"
    return f"{TITLES[result.metric]}: {after}, {before} {on}; {ONE_SEED}."


def _on_variant(result: Comparison, name: str, test: Difference) -> str:
    first, (other,) = result.groups[0], [group for group in result.groups if group.name == name]
    before, after = (f"{group.mean(result.metric):.1f}" for group in (first, other))
    counts = len(other.runs), len(first.runs)
    seeds = f"{counts[0]} seeds each" if counts[0] == counts[1] else "{} and {} seeds".format(*counts)
    measured = f"{TITLES[result.metric]} {_difference(test)}, {result.images} images, {seeds}."
    # Half a digit: a smaller difference is shown as 0.0.
    if abs(test.interval.value) < 0.05 and not test.excludes_zero and after == before:
        return f"Equal: {name} and {first.name} both have {after} {measured}"
    return f"{finding(test)}: {name} has {after} and {first.name} {before} {measured}"


def finding(test: Difference) -> str:
    """Return words for a test's result; a difference is clear only if interval and test agree."""
    if test.clear:
        return "Clear difference"
    if test.excludes_zero:
        return "Weak evidence of a difference (the interval excludes zero, the test is not significant)"
    if test.significant:
        return "Weak evidence of a difference (the test is significant, the interval includes zero)"
    return "No clear difference"
