"""Alphas as pictures: smoothed over the view, and painted on it in colour or, as in the paper, in white on grey."""

from __future__ import annotations

import functools
import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from captioning.cells import CellGrid

Style = Literal["color", "paper"]

# The authors' figures: 14 x 14 alphas upsampled x 16 and smoothed with a Gaussian of 20 pixels, on 224 pixels.
SIGMA_OF_SIDE = 20 / 224
SIGMA_OF_CELL = 20 / 16

NEARLY_EVEN = 2.0  # times even attention; a map with a lower maximum prefers no location
_LUMINANCE = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # of red, green and blue (ITU-R BT.601)
_COLORMAP = "inferno"  # perceptually uniform, safe for colour-blind readers, and monotonic in grey print

LOOKS: dict[Style, dict[str, float]] = {
    "color": {"dim": 0.4, "opacity": 0.5},
    "paper": {"dim": 0.25, "opacity": 0.7},
}
"""How a map shows on the view: its brightness where there is no attention, and the opacity of the map's colour where
there is most."""


def smooth_alphas(alpha: ArrayLike, cells: CellGrid) -> NDArray[np.float32]:
    """Return one step's alphas as a smooth map over the view: each pixel is a mean over cells, weighted by a Gaussian.

    The blur is the authors' (20 pixels on 224), but never more than theirs in cells (1.25), so that the map of a single
    cell has its maximum inside that cell on every grid. Beyond the outermost cells the map falls to the least alpha.
    Differs from the paper: the blurred map is stretched, so that its values are those of the alphas.

    Args:
        alpha: (L,).
        cells: The L cells; ``cells.scaled(size)`` for a map of another size.

    Returns:
        (height, width), from the least to the greatest alpha.
    """
    sigma = SIGMA_OF_SIDE * min(cells.size)
    down, across = (
        _weights(n, offset, stride, pixels, min(sigma, SIGMA_OF_CELL * stride))
        for n, offset, stride, pixels in zip(cells.grid_size, cells.offset, cells.stride, cells.size, strict=True)
    )
    values = np.asarray(alpha, dtype=np.float32).reshape(cells.grid_size)
    blurred = down @ values @ across.T + values.min() * (1 - np.outer(down.sum(axis=1), across.sum(axis=1)))
    return values.min() + (blurred - blurred.min()) * (np.ptp(values) / max(float(np.ptp(blurred)), 1e-12))


@functools.lru_cache(maxsize=16)
def _weights(n: int, offset: float, stride: float, pixels: int, sigma: float) -> NDArray[np.float32]:
    """Return the weights of n cells at each pixel of an axis, (pixels, n): the Gaussian's integral over each cell.

    The view is mirrored at a border that a cell reaches. The weights of a pixel sum to 1, or to less near a border that
    none reaches: a mirrored cell would draw the maximum there, out of its own.
    """
    edges = (offset + stride * (np.arange(n + 1) - 0.5)).clip(0, pixels)
    at = (np.arange(pixels) + 0.5)[:, None]
    reached = True, edges[0] < 1e-6, edges[-1] > pixels - 1e-6
    places = (place for place, one in zip((at, -at, 2 * pixels - at), reached, strict=True) if one)
    distances = ((edges - place) / (sigma * math.sqrt(2)) for place in places)
    return np.sum([np.diff(np.vectorize(math.erf)(distance)) / 2 for distance in distances], 0).astype(np.float32)


def is_nearly_even(alpha: NDArray[np.float32]) -> bool:
    """Return whether no location has twice as much as even attention would give it."""
    return bool(alpha.max() * alpha.size < NEARLY_EVEN)


def paint(view: NDArray[np.float32], smooth: NDArray[np.float32], end: float, style: Style) -> NDArray[np.uint8]:
    """Return the view under a map: dimmed where there is no attention, and lit and coloured at the end of the scale.

    The paper's style is white on a grey view. Differs from the paper: its white is 80 % opaque and hides what it points
    at.

    Args:
        view: (.., 3) in 0..1.
        smooth: (..), attention.
        end: The attention that is painted brightest.
        style: Key of ``LOOKS``.
    """
    look = LOOKS[style]
    strength = (smooth / np.float32(end)).clip(max=1)
    colors = map_colors()[128 + (strength * 127).astype(np.uint8)]  # the bright half: opacity makes weak ones faint
    if style == "paper":
        view, colors = (view @ _LUMINANCE)[..., None], np.ones_like(colors)
    light, opacity = (look["dim"] + (1 - look["dim"]) * strength)[..., None], look["opacity"] * strength[..., None]
    painted = view * light * (1 - opacity) + colors * opacity
    return (painted * 255).astype(np.uint8)


@functools.cache
def map_colors() -> NDArray[np.float32]:
    """Return the colours of a map from dark to bright, (256, 3) in 0..1."""
    from matplotlib import colormaps

    return np.asarray(colormaps[_COLORMAP](np.linspace(0, 0.93, 256)), dtype=np.float32)[:, :3]
