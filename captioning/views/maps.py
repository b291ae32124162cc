"""Alphas as pictures: smoothed over the view, and painted on it by light alone or by light and colour."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from captioning.cells import CellGrid
from captioning.trace import AttentionTrace

Style = Literal["color", "paper"]

# The authors' figures: 14 x 14 alphas upsampled x 16 and smoothed with a Gaussian of 20 pixels, on 224 pixels.
SIGMA_OF_SIDE = 20 / 224
SIGMA_OF_CELL = 20 / 16

DIM_BELOW = 3.0  # times even attention; a map with a lower maximum does not reach full brightness
_COLORMAP = "inferno"  # perceptually uniform, safe for colour-blind readers, and monotonic in grey print


class Look(NamedTuple):
    """How a map shows on the view.

    Attributes:
        dim: Brightness of the view where there is no attention; it has its own brightness at the end of the scale.
        opacity: Opacity of the map's colour at the end of the scale; the view shows through the rest.
    """

    dim: float
    opacity: float


LOOKS: dict[Style, Look] = {"color": Look(dim=0.6, opacity=0.5), "paper": Look(dim=0.35, opacity=0.0)}


def checked_trace(words: Sequence[str], trace: AttentionTrace, cells: CellGrid, *, prefix: str = "") -> AttentionTrace:
    """Return the trace of a caption's words as arrays of the shapes that words and cells ask for.

    Raises:
        ValueError: The shapes contradict each other; the message begins with ``prefix``.
    """
    height, width = cells.grid_size
    T, L = len(words), height * width
    heads = 0 if trace.heads is None else np.shape(trace.heads)[1]
    shapes = {"alphas": (T, L), "betas": (T,), "locations": (T,), "posterior": (T, L), "heads": (T, heads, L)}
    arrays: dict[str, Any] = {}
    for name, shape in shapes.items():
        if (values := getattr(trace, name)) is None:
            arrays[name] = None
            continue
        array = np.asarray(values, dtype=np.int64 if name == "locations" else np.float32)
        arrays[name] = array if array.size else array.reshape(shape)  # a caption may have no words
        if arrays[name].shape != shape:
            grid = f"{T} words on a grid of {height} x {width}"
            raise ValueError(f"{prefix}{name} must be {shape} for {grid}, got {array.shape}")
    return AttentionTrace(**arrays)


def smooth_alphas(alpha: ArrayLike, cells: CellGrid) -> NDArray[np.float32]:
    """Return one step's alphas as a smooth map over the view: upsampled by cell, blurred, mirrored at the border.

    Beyond the outermost cells the map falls to the least of the alphas. The blur is the authors' (20 pixels on 224),
    but never more than theirs in cells (1.25), so that the map of a single cell has its maximum inside that cell on
    every grid.

    Args:
        alpha: (L,).
        cells: The L cells; ``cells.scaled(size)`` for a map of another size.

    Returns:
        (height, width) on the scale of the alphas: even alphas of 1/L give 1/L everywhere, and on a regular grid the
        sum over pixels is the sum over cells times the pixels per cell.

    Raises:
        ValueError: L is not the number of cells.
    """
    values = np.asarray(alpha, dtype=np.float32)
    height, width = cells.grid_size
    if values.shape != (height * width,):
        raise ValueError(f"alpha must be ({height * width},) for a grid of {height} x {width}, got {values.shape}")
    sigma = SIGMA_OF_SIDE * min(cells.size)
    # Both steps are linear and separable: one matrix per axis does upsampling and blur together.
    (vertical, vertical_sums), (horizontal, horizontal_sums) = (
        _upsample_and_blur(tuple(edges.tolist()), pixels, min(sigma, SIGMA_OF_CELL * stride))
        for edges, pixels, stride in zip(cells.edges(), cells.size, cells.stride, strict=True)
    )
    outside = (1 - np.outer(vertical_sums, horizontal_sums)).astype(np.float32)
    smooth = vertical @ values.reshape(height, width) @ horizontal.T + values.min() * outside
    return np.asarray(smooth, dtype=np.float32)


@functools.lru_cache(maxsize=16)
def _upsample_and_blur(
    cell_edges: tuple[float, ...], pixels: int, sigma: float
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Return the matrix (pixels, cells), and its sums (pixels,): 1, but less near an edge that no cell reaches."""
    edges = np.array(cell_edges)
    pixel = np.arange(pixels)[:, None]
    # The fraction of each pixel in each cell; a pixel on an edge is divided between both cells.
    upsample = (np.minimum(pixel + 1, edges[1:]) - np.maximum(pixel, edges[:-1])).clip(min=0)
    radius = math.ceil(4 * sigma)
    offsets = np.arange(-radius, radius + 1)
    kernel = np.exp(-0.5 * (offsets / sigma) ** 2)
    source = pixel + offsets
    mirrored = source % (2 * pixels)  # mirrored at the border, which keeps the mass inside
    mirrored = np.where(mirrored < pixels, mirrored, 2 * pixels - 1 - mirrored)
    # There is nothing to mirror beyond an edge that no cell reaches.
    exists = ((source >= 0) | (edges[0] < 1e-6)) & ((source < pixels) | (edges[-1] > pixels - 1e-6))
    blurred = np.einsum("pkc,k->pc", upsample[mirrored] * exists[:, :, None], kernel / kernel.sum())
    return blurred.astype(np.float32), blurred.sum(axis=1)


def scale_end(maxima: Iterable[float], locations: int) -> float:
    """Return the attention that is painted brightest: the median of all maps' maxima, or three times even attention.

    So weak maps look weak beside strong ones, even attention stays dim, and one very strong map does not darken the
    others. Stronger attention is painted alike.
    """
    return max(float(np.median([*maxima] or [0.0])), DIM_BELOW / locations)


def paint(view: NDArray[np.float32], smooth: NDArray[np.float32], end: float, style: Style) -> NDArray[np.uint8]:
    """Return the view under a map: dimmed where there is no attention, and in its own light at the end of the scale.

    The colour style adds the map's colours. Differs from the paper: the white mask of Fig. 3 is 80 % opaque and hides
    what it points at.

    Args:
        view: (.., 3) in 0..1.
        smooth: (..), attention.
        end: The end of the scale (``scale_end``).
        style: Key of ``LOOKS``.
    """
    look = LOOKS[style]
    strength = (smooth / np.float32(end)).clip(max=1)
    colors = map_colors()[128 + (strength * 127).astype(np.uint8)]  # the bright half: opacity makes weak ones faint
    light, opacity = (look.dim + (1 - look.dim) * strength)[..., None], look.opacity * strength[..., None]
    painted = view * light * (1 - opacity) + colors * opacity
    return (painted * 255).astype(np.uint8)


@functools.cache
def map_colors() -> NDArray[np.float32]:
    """Return the colours of a map from dark to bright, (256, 3) in 0..1."""
    from matplotlib import colormaps

    return np.asarray(colormaps[_COLORMAP](np.linspace(0, 0.93, 256)), dtype=np.float32)[:, :3]
