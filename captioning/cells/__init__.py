"""The cells of an encoder's grid: where they lie on the pixels (``CellGrid``), and how that is measured."""

from captioning.cells.grid import CellGrid

__all__ = ["CellGrid"]
