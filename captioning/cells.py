"""Where the cells of an encoder's grid lie in its input, in pixels."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GridSize = tuple[int, int]
"""(height, width) of the grid of locations. L = height * width locations are numbered row by row."""


@dataclass(frozen=True)
class CellGrid:
    """Evenly spaced cells in rows and columns, in pixels of the encoder's input.

    The first pixel reaches from 0 to 1. A cell reaches half a stride to each side of its center, clipped to the view.
    The grid may leave a border uncovered.

    Attributes:
        grid_size: (height, width).
        offset: (y, x) of the first cell's center, in pixels.
        stride: (y, x) distance between neighboring centers, in pixels.
        size: (height, width) of the view, in pixels.
    """

    grid_size: GridSize
    offset: tuple[float, float]
    stride: tuple[float, float]
    size: tuple[int, int]

    @classmethod
    def regular(cls, grid_size: GridSize, size: tuple[int, int]) -> CellGrid:
        """Return the grid that cuts the view into equal cells."""
        stride = size[0] / grid_size[0], size[1] / grid_size[1]
        return cls(grid_size, (stride[0] / 2, stride[1] / 2), stride, size)

    def scaled(self, size: tuple[int, int]) -> CellGrid:
        """Return the same cells in the view scaled to ``size``, (height, width) in pixels."""
        y_scale, x_scale = size[0] / self.size[0], size[1] / self.size[1]
        offset, stride = ((y * y_scale, x * x_scale) for y, x in (self.offset, self.stride))
        return CellGrid(self.grid_size, offset, stride, size)

    def coverage(self, mask: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the fraction of each cell that a mask of the view covers, (height, width) of the grid.

        Only a cell's area inside the view counts; a cell outside has 0. A pixel on an edge is divided between cells.
        """
        (y_overlap, heights), (x_overlap, widths) = _overlaps(self)
        area = np.outer(heights, widths)
        covered = y_overlap @ mask.astype(np.float64) @ x_overlap.T
        return np.divide(covered, area, out=np.zeros_like(area), where=area > 0)

    def centers(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the centers in pixels: the rows' y (height,) and the columns' x (width,)."""
        y, x = (self.offset[axis] + np.arange(self.grid_size[axis]) * self.stride[axis] for axis in (0, 1))
        return np.asarray(y), np.asarray(x)

    def edges(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the edges in pixels, none outside the view: the rows' y (height + 1,) and the columns' x (width + 1,).

        Row ``i`` reaches from edge ``i`` to ``i + 1``.
        """
        # In this order the edges of a regular grid are whole multiples of its stride, without rounding errors.
        y, x = (
            (np.arange(count + 1) + (offset / stride - 0.5)) * stride
            for count, offset, stride in zip(self.grid_size, self.offset, self.stride, strict=True)
        )
        return y.clip(0, self.size[0]), x.clip(0, self.size[1])

    def box(self, location: int) -> tuple[float, float, float, float]:
        """Return (left, top, right, bottom) of a location's cell in pixels, inside the view."""
        row, column = divmod(location, self.grid_size[1])
        y, x = self.edges()
        return float(x[column]), float(y[row]), float(x[column + 1]), float(y[row + 1])


@functools.cache
def _overlaps(cells: CellGrid) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return for each axis the overlap of cells and pixels, (cells, pixels), and the lengths of the cells, (cells,)."""
    overlaps = []
    for edges, pixel_count, count in zip(cells.edges(), cells.size, cells.grid_size, strict=True):
        # In units of 1 / count of a pixel, the edges of a regular grid are whole numbers, which floats hold exactly.
        edges = np.round(edges * count, 6)
        pixel = np.arange(pixel_count) * count
        overlap = np.minimum(edges[1:, None], pixel + count) - np.maximum(edges[:-1, None], pixel)
        overlaps.append((overlap.clip(min=0), np.diff(edges)))
    return overlaps
