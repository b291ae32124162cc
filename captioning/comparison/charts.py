"""Curves of runs over optimizer steps, as pictures for a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping

from captioning.comparison.runs import Curve

_DOTS_UP_TO = 30  # points are marked as long as they do not run together


def line_chart(curves: Mapping[str, Curve], colors: Mapping[str, str]) -> str:
    """Return an SVG of curves over steps, on white, as a data URI.

    Args:
        curves: By run, (step, value) in the order of the steps.
        colors: By run, its colour as matplotlib takes it.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "text.parse_math": False}):  # text that stays text
        figure = Figure(figsize=(4.4, 2.6), layout="constrained")
        axes = figure.subplots()
        for run, curve in curves.items():
            steps, values = zip(*curve, strict=True)
            marker = "." if len(curve) <= _DOTS_UP_TO else ""
            axes.plot(steps, values, color=colors[run], marker=marker, linewidth=1.5, label=run.lstrip("_"))
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        if len(curves) > 1:
            axes.legend(fontsize=8, frameon=False)
        figure.savefig(file, format="svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
