"""Numbers of a comparison as the cells of its tables."""

from __future__ import annotations

import dataclasses
import math
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
    value = f"{test.interval.value:+.2f}"
    shown = "equal" if value in ("+0.00", "-0.00") else value
    return f"{shown} ({range_text(test.interval, signed=True)}), {p_text(test.corrected)}"


def plain_cell(value: Any, shape: str) -> Cell:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return Cell("")
    return Cell(shape.format(value), value=float(value) if isinstance(value, (int, float)) else None)


def with_best(cells: list[Cell]) -> list[Cell]:
    """Mark the best cell if it is clearly better than every other. All are tested against the first cell alone.

    The first is best if all others are clearly lower. Another is best if it is clearly higher than the first, and no
    third is higher than the first.
    """
    first, *others = cells
    scored = [cell for cell in others if cell.value is not None]
    if first.value is None or not scored:
        return cells
    best = max(cells, key=lambda cell: -math.inf if cell.value is None else cell.value)
    rivals = [cell for cell in scored if cell is not best]
    if best is first:
        certain = all(cell.clear for cell in rivals)
    else:
        certain = best.clear and all(cell.value <= first.value for cell in rivals if cell.value is not None)
    return [dataclasses.replace(cell, best=certain and cell is best) for cell in cells]


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
    return f"p = {value:.3f}" if value > 0.001 else "p ≤ 0.001"
