"""The positions of curves and intervals in small SVG drawings (chart.html, table.html)."""

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
_LABEL_WIDTH = 150  # units at most
_KEY = 12  # units of the colour before a label


def line_chart(
    title: str,
    curves: Mapping[str, Curve],
    *,
    colors: Mapping[str, str],
    dashed: Collection[str] = (),
    every_point: bool = False,
) -> str:
    """Return an <svg> of curves over steps, each labelled in the margin at the height of its last value.

    Its points are also in ``data-chart`` as JSON, for a script that shows the values under the pointer.

    Args:
        title: Read by screen readers.
        curves: By name, (step, value) in the order of the steps, with at least one point.
        colors: By name, a CSS colour.
        dashed: Names whose line is dashed.
        every_point: Whether to mark every point, such as a validation, however many there are. Otherwise a curve of
            many points is a thinned line.

    Raises:
        ValueError: There is no curve, or one has no point.
    """
    if not curves or not all(curves.values()):
        raise ValueError("a chart needs curves with at least one point each")
    thinned = {name: curve if every_point else _thinned(curve) for name, curve in curves.items()}
    labels = {name: _short(name) for name in curves}
    right = _WIDTH - 18 - _KEY - max(_width(label) for label in labels.values())
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
    heights = _label_heights({name: line[-1][1] + 3.5 for name, line in points.items()})
    return render(
        "comparison/chart.html",
        title=title,
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        right=right,
        key=_KEY,
        x_ticks=[(x_of(tick), tick) for tick in ticks(*x_range) if x_range[0] <= tick <= x_range[1]],
        y_ticks=[(y_of(tick), tick) for tick in y_ticks],
        curves=[
            {"name": name, "label": labels[name], "label_y": heights[name], "color": colors[name]}
            | {"points": line, "dashed": name in dashed, "dots": every_point or len(line) <= _DOTS_UP_TO}
            for name, line in points.items()
        ],
    )


class Axis(NamedTuple):
    """The values at both ends of a row's interval bars."""

    low: float
    high: float

    def place(self, value: float) -> str:
        """Return where a value lies between the ends, as CSS."""
        return f"{100 * (value - self.low) / (self.high - self.low):.1f}%"


def axis_of(cells: Sequence[Cell]) -> Axis | None:
    """Return the axis, with round ends, on which all intervals of a row lie; None if there are none."""
    ends = [end for cell in cells for end in cell.between or ()]
    if not ends:
        return None
    low, *_, high = ticks(min(ends), max(ends))
    return Axis(low, high)


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
    """Return at most ``_POINTS`` points, evenly spaced, with the first and the last."""
    if len(curve) <= _POINTS:
        return list(curve)
    return [curve[round(i * (len(curve) - 1) / (_POINTS - 1))] for i in range(_POINTS)]


def _label_heights(wanted: dict[str, float]) -> dict[str, float]:
    """Return heights near the wanted ones, at least ``_LABEL`` apart, and inside the chart if they fit."""
    placed: dict[str, float] = {}
    previous = -math.inf
    for name, y in sorted(wanted.items(), key=lambda item: item[1]):
        previous = placed[name] = max(y, previous + _LABEL, _TOP + 8)
    beyond = previous - (_HEIGHT - _BOTTOM - 4)
    return {name: round(y - max(0.0, beyond), 1) for name, y in placed.items()}


def _short(name: str) -> str:
    """Return both ends of a long name: the names of a sweep's runs start alike and differ at the end."""
    label, letters = name, len(name)
    while _width(label) > _LABEL_WIDTH:
        letters -= 1
        label = f"{name[: letters // 2]}…{name[len(name) - (letters - letters // 2) :]}"
    return label


def _width(text: str) -> int:
    """Return the units that a bold label needs in any of the page's fonts."""
    return sum(12 if letter in "mMW@%" else 10 if letter.isupper() or letter in "w…" else 7 for letter in text)
