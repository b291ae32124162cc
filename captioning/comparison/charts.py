"""Where curves and intervals lie in small SVG drawings (chart.html, table.html)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from captioning.comparison.result import Cell
from captioning.views.page import render

Curve = Sequence[tuple[int, float]]

_WIDTH, _HEIGHT = 400, 230  # of a chart's own units, about a pixel each
_LEFT, _TOP, _BOTTOM = 44, 10, 24
_POINTS = 400  # a curve of more is thinned: a screen shows no more
_DOTS_UP_TO = 30  # points are marked as long as they do not run together
_LABEL = 13  # units between labels
_LABEL_WIDTH = 126  # units at most


def line_chart(
    title: str, curves: Mapping[str, Curve], *, colors: Mapping[str, str], dashed: Collection[str] = ()
) -> str:
    """Return an <svg> of curves over steps, each labelled in the margin at the height of its last value.

    Its points stand in ``data-chart`` as JSON, so that a script can show the values under the pointer.

    Args:
        title: for screen readers.
        curves: by name, (step, value) in the order of the steps, at least one point each.
        colors: by name, a CSS colour.
        dashed: names whose line is dashed.

    Raises:
        ValueError: no curve, or one without a point.
    """
    if not curves or not all(curves.values()):
        raise ValueError("a chart needs curves with at least one point each")
    thinned = {name: _thinned(curve) for name, curve in curves.items()}
    labels = {name: _short(name) for name in curves}
    right = _WIDTH - 10 - max(_width(label) for label in labels.values())
    steps = [step for curve in thinned.values() for step, _ in curve]
    values = [value for curve in thinned.values() for _, value in curve]
    first = 0 if min(steps) < max(steps) / 2 else min(steps)  # a resumed run's curve may begin late
    x_range = (first, max(steps)) if max(steps) > first else (first - 1, first + 1)
    y_ticks = ticks(min(values), max(values))
    y_range = (min(y_ticks[0], min(values)), max(y_ticks[-1], max(values)))

    def x_of(step: float) -> float:
        return round(_LEFT + (step - x_range[0]) / (x_range[1] - x_range[0]) * (right - _LEFT), 1)

    def y_of(value: float) -> float:
        span = _HEIGHT - _TOP - _BOTTOM
        return round(_HEIGHT - _BOTTOM - (value - y_range[0]) / (y_range[1] - y_range[0]) * span, 1)

    points = {
        name: [(x_of(step), y_of(value), step, float(f"{value:.5g}")) for step, value in curve]
        for name, curve in thinned.items()
    }
    heights = _label_heights({name: found[-1][1] + 3.5 for name, found in points.items()})
    return render(
        "comparison/chart.html",
        title=title,
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        right=right,
        x_ticks=[(x_of(tick), tick) for tick in ticks(*x_range) if x_range[0] <= tick <= x_range[1]],
        y_ticks=[(y_of(tick), tick) for tick in y_ticks],
        curves=[
            {"name": name, "label": labels[name], "label_y": heights[name], "color": colors[name]}
            | {"points": found, "dashed": name in dashed, "dots": len(found) <= _DOTS_UP_TO}
            for name, found in points.items()
        ],
    )


class Axis(NamedTuple):
    """The values at both ends of interval bars that are to be compared."""

    low: float
    high: float

    def place(self, value: float) -> str:
        """Where a value lies between the ends, as CSS."""
        return f"{100 * (value - self.low) / (self.high - self.low):.1f}%"


def axis_of(cells: Sequence[Cell]) -> Axis | None:
    """Return the axis, with round ends, on which all intervals of a row lie; None if there are none."""
    ends = [end for cell in cells for end in cell.between or ()]
    if not ends:
        return None
    found = ticks(min(ends), max(ends))
    return Axis(found[0], found[-1])


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about ``count`` round numbers, evenly spaced, the first at most ``low`` and the last at least ``high``."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # equal but for rounding
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _thinned(curve: Curve) -> list[tuple[int, float]]:
    """At most ``_POINTS`` points, evenly, with the first and the last."""
    if len(curve) <= _POINTS:
        return list(curve)
    return [curve[round(i * (len(curve) - 1) / (_POINTS - 1))] for i in range(_POINTS)]


def _label_heights(wanted: dict[str, float]) -> dict[str, float]:
    """Heights near the wanted ones, at least ``_LABEL`` apart, all inside the chart as far as they fit."""
    placed: dict[str, float] = {}
    previous = -math.inf
    for name, y in sorted(wanted.items(), key=lambda item: item[1]):
        previous = placed[name] = max(y, previous + _LABEL, _TOP + 8)
    beyond = previous - (_HEIGHT - _BOTTOM - 4)
    return {name: round(y - max(0.0, beyond), 1) for name, y in placed.items()}


def _short(name: str) -> str:
    """Both ends of a long name: runs of one sweep begin alike and differ at the end."""
    label, letters = name, len(name)
    while _width(label) > _LABEL_WIDTH:
        letters -= 1
        label = f"{name[: letters // 2]}…{name[len(name) - (letters - letters // 2) :]}"
    return label


def _width(text: str) -> int:
    """Units that a label needs in any of the page's fonts, bold: the wide letters decide."""
    return sum(12 if letter in "mMW@%" else 10 if letter.isupper() or letter in "w…" else 7 for letter in text)
