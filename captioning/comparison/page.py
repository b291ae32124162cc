"""A comparison of runs as one HTML file that needs nothing else: page.html, its style page.css, its script page.js."""

from __future__ import annotations

from collections.abc import Sequence

from captioning.comparison.charts import axis_of, line_chart
from captioning.comparison.result import Comparison
from captioning.evaluation.scores import TITLES
from captioning.views.page import render

# Okabe and Ito's colours, distinguishable for colour-blind readers; further runs start over with a dashed line.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_NO_RUN = "#767676"


def comparison_page(comparison: Comparison, *, explorer: str = "", footer: Sequence[str] = ()) -> str:
    """Return a complete HTML document that opens from disk and needs no network.

    Args:
        comparison: The comparison.
        explorer: ``explorer_fragment`` of the images where the runs disagree, named by their ids. Without it the page
            has their captions as text.
        footer: Lines about where the page comes from.
    """
    colors = {run: color_of(number) for number, run in enumerate(comparison.runs)}
    colors |= {group.name: colors[group.runs[0]] for group in comparison.groups}
    no_runs = (name for table in comparison.tables for name in comparison.columns(table) if name not in colors)
    colors |= dict.fromkeys(no_runs, _NO_RUN)  # the paper
    dashed = comparison.runs[len(COLORS) :]
    return render(
        "comparison/page.html",
        title=" · ".join(comparison.runs),
        comparison=comparison,
        colors=colors,
        metric=TITLES[comparison.metric],
        charts={
            key: line_chart(key, curves, colors=colors, dashed=dashed) for key, curves in comparison.curves.items()
        },
        open_charts=6,  # the others are folded away
        explorer=explorer,
        footer=footer,
        axis_of=axis_of,
        zip=zip,
    )


def color_of(number: int) -> str:
    """Return the colour of the run at this place, from 0."""
    return COLORS[number % len(COLORS)]
