"""A comparison of runs as one HTML file that needs nothing else: page.html, its style page.css, its script page.js."""

from __future__ import annotations

from collections.abc import Sequence

from captioning.comparison.charts import axis_of, line_chart
from captioning.comparison.colors import Color, run_colors, started_over
from captioning.comparison.result import Comparison
from captioning.evaluation.metrics import TITLES
from captioning.views.page import render

_NO_RUN = Color("#767676", "#a0a0a0")
_LEADING = 3  # charts beside the first table
_WIDE = 4  # columns of a table that takes the whole width of a desktop
_NARROW = 3  # columns of a table that stays a table on a phone


def comparison_page(comparison: Comparison, *, explorer: str = "", footer: Sequence[str] = ()) -> str:
    """Return a complete HTML document that opens from disk and needs no network.

    Args:
        comparison: The comparison.
        explorer: ``explorer_fragment`` of the images where the runs disagree, named as they are
            (``Disagreement.name``). Without it the page has their captions as text.
        footer: Lines about where the page comes from.
    """
    palette = run_colors(comparison.variants)
    palette |= {group.name: palette[group.runs[len(group.runs) // 2]] for group in comparison.groups}
    no_runs = (name for table in comparison.tables for name in comparison.columns(table) if name not in palette)
    palette |= dict.fromkeys(no_runs, _NO_RUN)  # the paper
    colors = {name: f"var(--run-{number})" for number, name in enumerate(palette)}
    dashed = started_over(comparison.variants)
    charts = {
        key: line_chart(key, curves, colors=colors, dashed=dashed, every_point=key.startswith("val/"))
        for key, curves in comparison.curves.items()
        if max(map(len, curves.values())) > 1  # single points, as of one validation, are in the table
    }
    return render(
        "comparison/page.html",
        title=" · ".join(comparison.runs),
        comparison=comparison,
        palette=list(palette.values()),
        colors=colors,
        metric=TITLES[comparison.metric],
        leading=dict(list(charts.items())[:_LEADING]),
        charts=dict(list(charts.items())[_LEADING:]),
        wide=_WIDE,
        narrow=_NARROW,
        explorer=explorer,
        footer=footer,
        axis_of=axis_of,
        zip=zip,
    )
