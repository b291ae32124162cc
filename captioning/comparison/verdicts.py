"""The verdicts of a comparison: one sentence for each run or variant, which begins with the finding."""

from __future__ import annotations

from captioning.comparison.result import Comparison, p_text
from captioning.metrics.resampling import Difference
from captioning.metrics.table import TITLES

ONE_SEED = "one seed each, so nothing follows about the method"
"""The end of every verdict over runs of one seed each: other seeds could order the methods differently."""


def add_verdicts(result: Comparison) -> None:
    """Add a verdict on every tested variant and run. Only verdicts over several seeds claim a difference."""
    metric, title = result.metric, TITLES[result.metric]
    groups = {group.name: group for group in result.groups}
    for name, tests in {**result.group_tests, **result.tests}.items():
        test, change = tests[metric], tests[metric].interval
        difference = f"{change.value:+.1f}, {change.low:+.1f} to {change.high:+.1f}, {p_text(test.corrected)}"
        if name not in result.group_tests:
            first = result.runs[0]
            after, before = (f"{run} {result.scores[run][metric].value:.1f}" for run in (name, first))
            on = f"on these {result.images} images ({difference})"
            result.verdicts[name] = f"{title}: {after}, {before} {on}; {ONE_SEED}."
            continue
        first_group, other = result.groups[0], groups[name]
        first, before, after = first_group.name, f"{first_group.mean(metric):.1f}", f"{other.mean(metric):.1f}"
        counts = len(other.runs), len(first_group.runs)
        seeds = f"{counts[0]} seeds each" if counts[0] == counts[1] else "{} and {} seeds".format(*counts)
        measured = f"{title} ({difference}), {result.images} images, {seeds}."
        # Half a digit: a smaller difference is shown as 0.0.
        if abs(change.value) < 0.05 and not test.excludes_zero and after == before:
            result.verdicts[name] = f"Equal: {name} and {first} both have {after} {measured}"
        else:
            result.verdicts[name] = f"{finding(test)}: {name} has {after} and {first} {before} {measured}"


def finding(test: Difference) -> str:
    """Return words for a test's result; a difference is clear only if interval and test agree."""
    if test.clear:
        return "Clear difference"
    if test.excludes_zero:
        return "Weak evidence of a difference (the interval excludes zero, the test is not significant)"
    if test.significant:
        return "Weak evidence of a difference (the test is significant, the interval includes zero)"
    return "No clear difference"
