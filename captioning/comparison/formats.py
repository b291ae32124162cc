"""Numbers of a comparison as the cells of its tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from captioning.comparison.result import Cell
from captioning.evaluation.resampling import Difference, Interval


def measured_cell(interval: Interval | None, test: Difference | None, *, of: str = "") -> Cell:
    if interval is None:
        return Cell("")
    change, clear = "", False
    if test is not None:
        change = change_text(test)
        clear = test.clear
    detail = range_text(interval) + (f", {of}" if of else "")
    return Cell(
        f"{interval.value:.2f}", detail, change, clear, value=interval.value, between=(interval.low, interval.high)
    )


def change_text(test: Difference) -> str:
    return f"{test.interval.value:+.2f} ({range_text(test.interval, signed=True)}), {p_text(test.corrected)}"


def plain_cell(value: Any, shape: str) -> Cell:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return Cell("")
    return Cell(shape.format(value), value=float(value) if isinstance(value, (int, float)) else None)


def with_best(cells: list[Cell], choose: Callable[[list[float]], float]) -> list[Cell]:
    """Mark the best cells as shown: equal texts are equally good. Nothing is best among equals or alone."""
    shown = {cell.text for cell in cells if cell.value is not None}
    if len(shown) < 2:
        return cells
    best = choose([cell.value for cell in cells if cell.value is not None])
    text = next(cell.text for cell in cells if cell.value == best)
    return [dataclasses.replace(cell, best=cell.text == text) for cell in cells]


def duration(seconds: float | None) -> Cell:
    if seconds is None:
        return Cell("")
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
    return Cell(text, value=float(seconds))


def range_text(interval: Interval, *, signed: bool = False) -> str:
    shape = "{:+.2f} to {:+.2f}" if signed else "{:.1f} to {:.1f}"
    return shape.format(interval.low, interval.high)


def p_text(value: float) -> str:
    return f"p = {value:.3f}" if value >= 0.0015 else "p ≤ 0.001"
