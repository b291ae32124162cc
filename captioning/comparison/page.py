"""A comparison of runs as one HTML file that needs nothing else: page.html and its style page.css."""

import base64
import io
from collections.abc import Mapping, Sequence

from captioning.comparison.result import Comparison
from captioning.comparison.runs import Curve
from captioning.inference.caption import Caption
from captioning.metrics.table import METRICS
from captioning.views.templates import render

# The colors of Okabe and Ito, which color-blind readers can tell apart. Variants beyond the seventh reuse them.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")


def comparison_page(
    comparison: Comparison, *, explorer: str = "", reference: Caption | None = None, footer: Sequence[str] = ()
) -> str:
    """Return a complete HTML document that opens from disk and needs no network.

    ``explorer`` is the ``explorer_fragment`` of the disagreements; without it, the page has their captions as text.
    ``reference`` is a reference with the attention of several models, whose figure the page shows.
    """
    colors = {run: _COLORS[n % len(_COLORS)] for n, runs in enumerate(comparison.variant_runs) for run in runs}
    colors |= {variant.name: colors[variant.runs[0]] for variant in comparison.variants}
    charts = [
        (key, _line_chart(key, curves, colors))
        for key, curves in comparison.curves.items()
        if max(map(len, curves.values())) > 1  # a single point, as of one validation, makes no curve
    ]
    return render(
        "comparison/page.html",
        title=" · ".join(comparison.runs),
        comparison=comparison,
        colors=colors,
        metric=METRICS[comparison.metric].title,
        charts=charts,
        explorer=explorer,
        figure=reference and f"data:image/jpeg;base64,{base64.b64encode(reference.jpeg()).decode()}",
        footer=footer,
    )


def _line_chart(key: str, curves: Mapping[str, Curve], colors: Mapping[str, str]) -> str:
    """Return an SVG of curves over steps, on white, as a data URI."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "text.parse_math": False}):  # letters instead of outlines and formulas
        figure = Figure(figsize=(4.4, 2.6), layout="constrained")
        axes = figure.subplots()
        for run, curve in curves.items():
            axes.plot(*zip(*curve, strict=True), ".-", color=colors[run], linewidth=1.5, label=run.lstrip("_"))
        metric = METRICS.get(key.partition("/")[2])
        axes.set_xlabel("optimizer steps", fontsize=8)
        axes.set_ylabel(f"{metric.title}, {metric.unit}" if metric else key.partition("/")[2], fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        if 1 < len(curves) <= 12:  # a longer legend leaves no room; the table has the colors
            axes.legend(fontsize=8, frameon=False)
        figure.savefig(file, format="svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
