"""A comparison of runs as one HTML file that needs nothing else: page.html and its style page.css."""

from __future__ import annotations

from collections.abc import Sequence

from captioning.comparison.charts import line_chart
from captioning.comparison.result import Comparison
from captioning.evaluation.metrics import TITLES
from captioning.views.page import render

# Okabe and Ito's colours, distinguishable for colour-blind readers, one for a variant; further variants start over.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_LEADING = 3  # charts beside the first table


def comparison_page(comparison: Comparison, *, explorer: str = "", footer: Sequence[str] = ()) -> str:
    """Return a complete HTML document that opens from disk and needs no network.

    Args:
        comparison: The comparison.
        explorer: ``explorer_fragment`` of the images where the runs disagree. Without it the page has their captions as
            text.
        footer: Lines about where the page comes from.
    """
    colors = {run: _COLORS[number % len(_COLORS)] for number, runs in enumerate(comparison.variants) for run in runs}
    colors |= {group.name: colors[group.runs[0]] for group in comparison.groups}
    charts = [
        (key, line_chart(curves, colors))
        for key, curves in comparison.curves.items()
        if max(map(len, curves.values())) > 1  # single points, as of one validation, are in the table
    ]
    return render(
        "comparison/page.html",
        title=" · ".join(comparison.runs),
        comparison=comparison,
        colors=colors,
        metric=TITLES[comparison.metric],
        leading=charts[:_LEADING],
        charts=charts[_LEADING:],
        explorer=explorer,
        footer=footer,
        zip=zip,
    )
