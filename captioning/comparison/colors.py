"""The colours of runs: one for each variant, its seeds in shades of it, on light and on dark paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Okabe and Ito's colours, distinguishable for colour-blind readers; further variants start over.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_DARKER, _LIGHTER = 0.3, 0.4  # fractions of black and of white in the outer shades
_ON_DARK = 0.4  # fraction of white in a colour on dark paper


class Color(NamedTuple):
    """A colour on light and on dark paper, as #rrggbb."""

    light: str
    dark: str


def run_colors(variants: Sequence[Sequence[str]]) -> dict[str, Color]:
    """Return the colours of the runs of all variants by name."""
    colors: dict[str, Color] = {}
    for number, runs in enumerate(variants):
        shades = _shades(_COLORS[number % len(_COLORS)], len(runs))
        colors |= {run: Color(shade, _mixed(shade, _ON_DARK)) for run, shade in zip(runs, shades, strict=True)}
    return colors


def started_over(variants: Sequence[Sequence[str]]) -> list[str]:
    """Return the runs whose colour an earlier variant has too."""
    return [run for runs in variants[len(_COLORS) :] for run in runs]


def _shades(color: str, count: int) -> list[str]:
    """Return the colour itself if it is for one run, else shades of it from dark to light."""
    if count == 1:
        return [color]
    step = (_DARKER + _LIGHTER) / (count - 1)
    return [_mixed(color, number * step - _DARKER) for number in range(count)]


def _mixed(color: str, amount: float) -> str:
    """Return a colour mixed with a fraction of white, or of black if the amount is negative."""
    other = 255 if amount > 0 else 0
    channels = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(value + abs(amount) * (other - value)):02x}" for value in channels)
