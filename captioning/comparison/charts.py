"""Small SVG drawings for HTML pages: curves whose values can be read off, and intervals."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Collection, Mapping, Sequence

Curve = Sequence[tuple[int, float]]

_WIDTH, _HEIGHT = 360, 230  # of a chart's own units, about a pixel each
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 10, 24
_POINTS = 400  # a curve of more is thinned: a screen shows no more
_DOTS_UP_TO = 30  # points are marked while they can be told apart
_LABEL = 13  # units between direct labels
_LABEL_LETTERS = 26


def line_chart(
    title: str, curves: Mapping[str, Curve], *, colors: Mapping[str, str], dashed: Collection[str] = ()
) -> str:
    """Return an <svg> of curves over steps, each labelled at its end.

    Its points stand in ``data-chart`` as JSON, so that a script can show the values under the pointer.

    Args:
        title: said by a screen reader.
        curves: by name, (step, value) in the order of the steps, at least one point each.
        colors: by name, a CSS colour.
        dashed: names whose line is dashed.

    Raises:
        ValueError: no curve, or one without a point.
    """
    if not curves or not all(curves.values()):
        raise ValueError("a chart needs curves with at least one point each")
    thinned = {name: _thinned(curve) for name, curve in curves.items()}
    steps = [step for curve in thinned.values() for step, _ in curve]
    values = [value for curve in thinned.values() for _, value in curve]
    first = 0 if min(steps) < max(steps) / 2 else min(steps)  # a resumed run's curve may begin late
    x_range = (first, max(steps)) if max(steps) > first else (first - 1, first + 1)
    x_ticks, y_ticks = ticks(*x_range), ticks(min(values), max(values))
    y_range = (min(y_ticks[0], min(values)), max(y_ticks[-1], max(values)))

    def place(step: float, value: float) -> tuple[float, float]:
        x = _LEFT + (step - x_range[0]) / (x_range[1] - x_range[0]) * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - (value - y_range[0]) / (y_range[1] - y_range[0]) * (_HEIGHT - _TOP - _BOTTOM)
        return round(x, 1), round(y, 1)

    parts = []
    for tick in y_ticks:
        y = place(x_range[0], tick)[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 3.5}" text-anchor="end">{tick:,.10g}</text>')
    for tick in x_ticks:
        if x_range[0] <= tick <= x_range[1]:
            x = place(tick, y_range[0])[0]
            anchor = "end" if x > _WIDTH - 24 else "middle"
            parts.append(f'<text x="{x}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{tick:,.10g}</text>')
    data = []
    ends = {}
    for name, curve in thinned.items():
        points = [place(step, value) for step, value in curve]
        dash = ' stroke-dasharray="5 3"' if name in dashed else ""
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path}" stroke="{colors[name]}"{dash}/>')
        if len(points) <= _DOTS_UP_TO:
            parts += [f'<circle cx="{x}" cy="{y}" r="2.4" fill="{colors[name]}"/>' for x, y in points]
        ends[name] = points[-1]
        data.append(
            {
                "name": name,
                "color": colors[name],
                "points": [
                    [x, y, step, float(f"{value:.5g}")] for (x, y), (step, value) in zip(points, curve, strict=True)
                ],
            }
        )
    for name, y in _label_heights({name: y - 6 for name, (_, y) in ends.items()}).items():
        x = min(ends[name][0], _WIDTH - _RIGHT)
        anchor = "end" if x > _WIDTH / 2 else "start"
        parts.append(
            f'<text class="label" x="{x}" y="{y}" text-anchor="{anchor}" '
            f'style="--label: {colors[name]}">{_short(name)}</text>'
        )
    content = html.escape(json.dumps(data, separators=(",", ":")))
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{html.escape(title)}" data-chart="{content}">{"".join(parts)}</svg>'
    )


def interval_bar(value: float, between: tuple[float, float], scale: tuple[float, float], color: str) -> str:
    """Return an <svg> of the line from one end of an interval to the other and a dot at the value.

    Args:
        value, between: what to draw.
        scale: the values at the drawing's ends, the same for bars that are to be compared.
        color: a CSS colour.
    """
    low, high = scale
    width = high - low or 1.0

    def place(x: float) -> str:
        return f"{4 + 92 * (x - low) / width:.1f}%"

    return (
        '<svg class="interval" aria-hidden="true" width="100%" height="9">'
        f'<line x1="{place(between[0])}" x2="{place(between[1])}" y1="4.5" y2="4.5" stroke="{color}"/>'
        f'<circle cx="{place(value)}" cy="4.5" r="3.2" fill="{color}"/></svg>'
    )


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about ``count`` round numbers, evenly spaced, the first at most ``low`` and the last at least ``high``."""
    if high <= low:
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
    return html.escape(name if len(name) <= _LABEL_LETTERS else name[: _LABEL_LETTERS - 1] + "…")
