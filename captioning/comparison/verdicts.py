"""The verdicts of a comparison: sentences on each run or variant, which begin with what was found."""

from __future__ import annotations

from captioning.comparison.result import Comparison, p_text
from captioning.evaluation.metrics import TITLES
from captioning.evaluation.resampling import Difference

ONE_SEED = "one seed each, which says nothing about the method"
"""What every verdict over runs of one seed each says, since other seeds could order the methods differently."""


def add_verdicts(result: Comparison) -> None:
    """Add a verdict on every variant and every run that is tested against the first."""
    metric, title = result.metric, TITLES[result.metric]
    groups = {group.name: group for group in result.groups}
    for name, tests in {**result.group_tests, **result.tests}.items():
        if name in result.group_tests:
            first, other = result.groups[0].name, groups[name]
            before, after = result.groups[0].mean(metric), other.mean(metric)
            counts = len(other.runs), len(result.groups[0].runs)
            seeds = f"{counts[0]} seeds each" if counts[0] == counts[1] else "{} and {} seeds".format(*counts)
        else:
            first, seeds = result.runs[0], ONE_SEED
            before, after = (result.scores[run][metric].value for run in (first, name))
        test, change = tests[metric], tests[metric].interval
        difference = f"{change.value:+.1f}, {change.low:+.1f} to {change.high:+.1f}, {p_text(test.corrected)}"
        measured = f"{title} ({difference}), {result.images} images, {seeds}."
        # Half a digit: a smaller difference is shown as 0.0.
        if abs(change.value) < 0.05 and not test.excludes_zero and f"{after:.1f}" == f"{before:.1f}":
            result.verdicts[name] = f"Equal: {name} and {first} both have {after:.1f} {measured}"
        else:
            result.verdicts[name] = f"{finding(test)}: {name} has {after:.1f} and {first} {before:.1f} {measured}"


def finding(test: Difference) -> str:
    """Return whether there is a difference, which is clear only where interval and test agree."""
    if test.clear:
        return "Clear difference"
    if test.excludes_zero:
        return "Weak evidence of a difference (the interval excludes zero, the test is not significant)"
    if test.significant:
        return "Weak evidence of a difference (the test is significant, the interval includes zero)"
    return "No clear difference"
