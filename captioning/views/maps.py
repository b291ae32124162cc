"""A step's alphas as a picture: smoothed over the view, and painted on it in colour or as the paper's white mask."""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from captioning.cells import CellGrid

Style = Literal["color", "paper"]

# The authors' figures: 14 x 14 alphas upsampled x 16 and smoothed with a Gaussian of 20 pixels, on 224 pixels.
SIGMA_OF_SIDE = 20 / 224
SIGMA_OF_CELL = 20 / 16

DIM_BELOW = 3.0  # times even attention: a map whose maximum is lower does not reach full brightness
DIM_CHOSEN = 0.8  # of its brightness: a distribution beneath the cell that was drawn from it
DIM_VIEW = 0.55  # of its brightness: the view where nothing is attended to
MASK_OPACITY = 0.8  # of the paper's mask over the view
_COLORMAP = "inferno"  # perceptually uniform, safe for colour-blind readers, and monotonic in grey print


class Painted(NamedTuple):
    """The view with a map on it.

    Attributes:
        pixels: (height, width, 3) uint8.
        low, high: the smoothed alphas at both ends of the value scale.
    """

    pixels: NDArray[np.uint8]
    low: float
    high: float


def smooth_alphas(alpha: ArrayLike, cells: CellGrid) -> NDArray[np.float32]:
    """Return one step's alphas as a smooth map over the view: upsampled by cell, blurred, mirrored at the border.

    Where no cell lies, beyond the outermost ones, the map falls to the least of the alphas. The blur is the authors'
    (20 pixels on 224, whatever the size), and never more than theirs in cells (1.25), so that one attended cell has its
    maximum inside that cell on every grid.

    Args:
        alpha: (L,).
        cells: the L cells; ``cells.scaled(size)`` for a map of another size.

    Returns:
        (height, width) with the values' own scale: even alphas of 1/L give 1/L everywhere, and on a regular grid the
        sum over pixels is the sum over cells times the pixels per cell.

    Raises:
        ValueError: L is not rows x columns.
    """
    values = np.asarray(alpha, dtype=np.float32)
    rows, columns = cells.grid_size
    if values.shape != (rows * columns,):
        raise ValueError(f"alpha must be ({rows * columns},) for a grid of {rows} x {columns}, got {values.shape}")
    sigma = SIGMA_OF_SIDE * min(cells.size)
    # Both steps are linear and separable: one matrix per axis does upsampling and blur together.
    (vertical, in_rows), (horizontal, in_columns) = (
        _upsample_and_blur(tuple(edges.tolist()), pixels, min(sigma, SIGMA_OF_CELL * stride))
        for edges, pixels, stride in zip(cells.edges(), cells.size, cells.stride, strict=True)
    )
    elsewhere = (1 - np.outer(in_rows, in_columns)).astype(np.float32)
    smooth = vertical @ values.reshape(rows, columns) @ horizontal.T + values.min() * elsewhere
    return np.asarray(smooth, dtype=np.float32)


@functools.lru_cache(maxsize=16)
def _upsample_and_blur(
    cell_edges: tuple[float, ...], pixels: int, sigma: float
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """(pixels, cells), and its rows' sums (pixels,): 1, but less near an edge of the view that no cell reaches."""
    edges = np.array(cell_edges)
    pixel = np.arange(pixels)[:, None]
    # The share of each pixel in each cell; where an edge runs through a pixel, both cells have a part of it.
    upsample = (np.minimum(pixel + 1, edges[1:]) - np.maximum(pixel, edges[:-1])).clip(min=0)
    radius = math.ceil(4 * sigma)
    offsets = np.arange(-radius, radius + 1)
    kernel = np.exp(-0.5 * (offsets / sigma) ** 2)
    source = pixel + offsets
    mirrored = source % (2 * pixels)  # a mirror at the border keeps all of the mass inside
    mirrored = np.where(mirrored < pixels, mirrored, 2 * pixels - 1 - mirrored)
    # Beyond an edge that no cell reaches there is nothing to mirror.
    there = ((source >= 0) | (edges[0] < 1e-6)) & ((source < pixels) | (edges[-1] > pixels - 1e-6))
    blurred = np.einsum("pkc,k->pc", upsample[mirrored] * there[:, :, None], kernel / kernel.sum())
    return blurred.astype(np.float32), blurred.sum(axis=1)


def paint_color(view: NDArray[np.float32], alpha: ArrayLike, cells: CellGrid, *, chosen: bool) -> Painted:
    """Paint one step's alphas in colour on the dimmed view.

    The map is scaled from zero to its own maximum, or to three times even attention if that is more: maps compare in
    shape, and a map that looks everywhere stays dim.

    Args:
        view: (height, width, 3) in 0..1.
        alpha: (L,).
        cells: the L cells on ``view``.
        chosen: whether hard attention drew a cell from them; the map is then dimmed, for the cell to stand out.
    """
    smooth = smooth_alphas(alpha, cells)
    high = max(float(smooth.max()), DIM_BELOW / np.size(alpha)) / (DIM_CHOSEN if chosen else 1.0)
    strength = smooth / high
    colors = map_colors()[(strength * 255).astype(np.uint8)]
    opacity = 0.75 * strength[:, :, None]
    # The colour takes on the view's light and shade, so that what is attended to stays recognisable.
    shade = 0.6 + 0.5 * (view @ np.array([0.299, 0.587, 0.114], dtype=np.float32))[:, :, None]
    painted = DIM_VIEW * view * (1 - opacity) + colors * shade * opacity
    return Painted((painted.clip(max=1) * 255).astype(np.uint8), 0.0, high)


def paint_mask(view: NDArray[np.float32], alpha: ArrayLike, cells: CellGrid, *, chosen: bool) -> Painted:
    """Paint the white mask of the paper's Fig. 3, as the authors' code does; arguments as of ``paint_color``.

    The map from black at its own minimum to white at its own maximum, with an opacity of 0.8: even attention shows as
    strong as any other.
    """
    smooth = smooth_alphas(alpha, cells)
    low, high = float(smooth.min()), float(smooth.max())
    span = max(high - low, 1e-3 * high) / (DIM_CHOSEN if chosen else 1.0)  # even attention differs by rounding alone
    grey = (smooth - low) / span
    painted = (1 - MASK_OPACITY) * view + MASK_OPACITY * grey[:, :, None]
    return Painted((painted * 255).astype(np.uint8), low, low + span)


@functools.cache
def map_colors() -> NDArray[np.float32]:
    """Return the colours of a map from dark to bright, (256, 3) in 0..1."""
    from matplotlib import colormaps

    return np.asarray(colormaps[_COLORMAP](np.linspace(0, 0.93, 256)), dtype=np.float32)[:, :3]


def mask_greys() -> NDArray[np.float32]:
    """Return the greys of a mask from dark to bright, (256, 3) in 0..1."""
    return np.repeat(np.linspace(0, 1, 256, dtype=np.float32)[:, None], 3, axis=1)
