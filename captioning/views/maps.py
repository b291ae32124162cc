"""Alphas as pictures: smoothed over the view, and painted on it in color or, as in the paper, in white on gray."""

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

NEARLY_EVEN = 2.0  # a map prefers no location if its maximum is less than this multiple of even attention
_LUMINANCE = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # of red, green and blue (ITU-R BT.601)
_COLORMAP = "inferno"  # perceptually uniform, safe for color-blind readers, and monotonic in gray print

STYLES: dict[Style, dict[str, float]] = {"color": {"dim": 0.4, "opacity": 0.5}, "paper": {"dim": 0.25, "opacity": 0.7}}
"""dim: brightness of the view without attention. opacity: opacity of the map at the greatest attention."""


def smooth_alphas(alpha: ArrayLike, cells: CellGrid) -> NDArray[np.float32]:
    """Return one step's alphas (L,) as a smooth map (height, width): a pixel is a Gaussian-weighted mean over cells.

    The Gaussian is as wide as in the paper, 20 pixels on 224 pixels, but at most 1.25 cells wide, so that the map of a
    single cell has its maximum inside that cell on every grid. Beyond the outermost cells the map falls to the least
    alpha. Differs from the paper: the blurred map is stretched to the range of the alphas. ``cells.scaled(size)`` gives
    a map of another size.
    """
    sigma = SIGMA_OF_SIDE * min(cells.size)
    down, across = (
        _gaussian_weights(count, offset, stride, pixels, min(sigma, SIGMA_OF_CELL * stride))
        for count, offset, stride, pixels in zip(cells.grid_size, cells.offset, cells.stride, cells.size, strict=True)
    )
    values = np.asarray(alpha, dtype=np.float32).reshape(cells.grid_size)
    blurred = down @ values @ across.T + values.min() * (1 - np.outer(down.sum(axis=1), across.sum(axis=1)))
    return values.min() + (blurred - blurred.min()) * (np.ptp(values) / max(float(np.ptp(blurred)), 1e-12))


@functools.lru_cache(maxsize=16)
def _gaussian_weights(count: int, offset: float, stride: float, pixels: int, sigma: float) -> NDArray[np.float32]:
    """Return the weights of the cells at each pixel of an axis, (pixels, count): the Gaussian's integral over a cell.

    The view is mirrored at a border that a cell reaches, so that a pixel's weights sum to 1. Near any other border the
    weights sum to less, because mirroring would move the maximum out of its cell.
    """
    edges = (offset + stride * (np.arange(count + 1) - 0.5)).clip(0, pixels)
    centers = (np.arange(pixels) + 0.5)[:, None]
    mirrored = [-centers] if edges[0] < 1e-6 else []
    mirrored += [2 * pixels - centers] if edges[-1] > pixels - 1e-6 else []
    distances = ((edges - center) / (sigma * math.sqrt(2)) for center in [centers, *mirrored])
    return np.sum([np.diff(np.vectorize(math.erf)(distance)) / 2 for distance in distances], 0).astype(np.float32)


def paint(view: NDArray[np.float32], smooth: NDArray[np.float32], maximum: float, style: Style) -> NDArray[np.uint8]:
    """Return the view (.., 3) in 0 .. 1 with the map ``smooth`` (..) on it: dim at 0, brightest from ``maximum``.

    The strength of the map is the square root of the attention. A word with a tenth of the greatest attention therefore
    stays visible. The paper's style is white on a gray view. Differs from the paper, whose white is 80 % opaque and
    hides the object.
    """
    tone = STYLES[style]
    strength = np.sqrt((smooth / np.float32(maximum)).clip(0, 1))
    colors = map_colors()[128 + (strength * 127).astype(np.uint8)]  # the bright half: opacity makes weak ones faint
    if style == "paper":
        view, colors = (view @ _LUMINANCE)[..., None], np.ones_like(colors)
    light, opacity = (tone["dim"] + (1 - tone["dim"]) * strength)[..., None], tone["opacity"] * strength[..., None]
    painted = view * light * (1 - opacity) + colors * opacity
    return (painted * 255).astype(np.uint8)


@functools.cache
def map_colors() -> NDArray[np.float32]:
    """Return the colors of a map from dark to bright, (256, 3) in 0 .. 1."""
    from matplotlib import colormaps

    return np.asarray(colormaps[_COLORMAP](np.linspace(0, 0.93, 256)), dtype=np.float32)[:, :3]
