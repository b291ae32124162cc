"""Where the cells of an encoder's grid lie on the pixels of its input."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class CellGrid:
    """Cells in rows and columns, evenly spaced, wherever they begin: centres in pixels of the encoder's input.

    0 is the outer edge of the first pixel, whose centre is 0.5. A cell is the square that reaches half a stride around
    its centre, cut off where the view ends; the squares need not reach to the view's edges.

    Attributes:
        grid_size: (rows, columns) with rows x columns = L locations, row by row.
        offset: (y, x), pixels, the centre of the first cell.
        stride: (y, x), pixels, from one centre to the next.
        size: (height, width) of the view, in pixels.
        standard_error: (y, x), pixels, of a measured offset; 0 where it is known. Two grids are equal without it.
    """

    grid_size: tuple[int, int]
    offset: tuple[float, float]
    stride: tuple[float, float]
    size: tuple[int, int]
    standard_error: tuple[float, float] = dataclasses.field(default=(0.0, 0.0), compare=False)

    @classmethod
    def regular(cls, grid_size: tuple[int, int], size: tuple[int, int]) -> CellGrid:
        """Return the grid that cuts the view into equal cells, for want of knowing better."""
        (rows, columns), (height, width) = grid_size, size
        stride = height / rows, width / columns
        return cls(grid_size, (stride[0] / 2, stride[1] / 2), stride, size)

    @classmethod
    def from_dict(cls, pairs: dict[str, Any]) -> CellGrid:
        """Rebuild what ``dataclasses.asdict`` described; its tuples are lists in JSON."""
        return cls(**{name: (pair[0], pair[1]) for name, pair in pairs.items()})

    @classmethod
    def pooled(cls, grids: Sequence[CellGrid]) -> CellGrid:
        """Return the mean of grids that differ in their offsets alone, weighted by 1 / standard error ** 2.

        Offsets without an error outweigh all others, on each axis by itself.
        """
        if len(set(grids)) == 1:  # equal offsets stay exactly as they are
            return grids[0]
        offsets, errors = (np.array([getattr(grid, name) for grid in grids]) for name in ("offset", "standard_error"))
        known = errors == 0  # (grids, axis)
        weights = np.where(known.any(axis=0), known, np.divide(1, errors**2, where=~known, out=np.zeros_like(errors)))
        (y, x), total = (weights * offsets).sum(axis=0) / weights.sum(axis=0), weights.sum(axis=0)
        error = np.where(known.any(axis=0), 0, 1 / np.sqrt(total))
        return dataclasses.replace(
            grids[0], offset=(float(y), float(x)), standard_error=(float(error[0]), float(error[1]))
        )

    def scaled(self, size: tuple[int, int]) -> CellGrid:
        """Return the same cells of a view that was enlarged or reduced to ``size``."""
        if size == self.size:
            return self
        (y, x), (down, right), factors = self.offset, self.stride, np.divide(size, self.size).tolist()
        errors = self.standard_error
        return dataclasses.replace(
            self,
            offset=(y * factors[0], x * factors[1]),
            stride=(down * factors[0], right * factors[1]),
            size=size,
            standard_error=(errors[0] * factors[0], errors[1] * factors[1]),
        )

    def near(self, other: CellGrid) -> bool:
        """Whether every cell lies within a quarter of a stride of the other grid's: in a picture, the same place."""
        apart = np.abs(np.subtract(self.offset, other.offset))
        alike = (self.grid_size, self.stride, self.size) == (other.grid_size, other.stride, other.size)
        return alike and bool((apart <= np.divide(self.stride, 4)).all())

    def differs(self, other: CellGrid) -> bool:
        """Whether the grids lie apart by more than two standard errors of the distance between them."""
        if (self.grid_size, self.stride, self.size) != (other.grid_size, other.stride, other.size):
            return True
        apart = np.abs(np.subtract(self.offset, other.offset))
        return bool((apart > 2 * np.hypot(self.standard_error, other.standard_error)).any())

    def centre(self, location: int) -> tuple[float, float]:
        """Return (y, x) of a location's centre."""
        row, column = divmod(location, self.grid_size[1])
        return self.offset[0] + row * self.stride[0], self.offset[1] + column * self.stride[1]

    def centres(self) -> tuple[Float64, Float64]:
        """Return the rows' y and the columns' x."""
        y, x = (self.offset[axis] + np.arange(self.grid_size[axis]) * self.stride[axis] for axis in (0, 1))
        return np.asarray(y), np.asarray(x)

    def edges(self) -> tuple[Float64, Float64]:
        """Return the rows' edges (rows + 1,) in y and the columns' in x, none outside the view.

        Row ``i`` reaches from edge ``i`` to ``i + 1``.
        """
        y, x = (self._edges(axis).clip(0, self.size[axis]) for axis in (0, 1))
        return y, x

    def _edges(self, axis: int) -> Float64:
        # In this order the edges of a regular grid are whole multiples of its stride, without rounding errors.
        before = self.offset[axis] / self.stride[axis] - 0.5
        return np.asarray((np.arange(self.grid_size[axis] + 1) + before) * self.stride[axis])

    def square(self, location: int) -> tuple[float, float, float, float]:
        """Return (top, bottom, left, right) of a location's square, inside the view."""
        row, column = divmod(location, self.grid_size[1])
        y, x = self.edges()
        return float(y[row]), float(y[row + 1]), float(x[column]), float(x[column + 1])
