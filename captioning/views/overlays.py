"""The paper's figure: the image as the model saw it, then where it looked at each word (Xu et al. 2015, Fig. 2, 3)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from captioning.cells import CellGrid
from captioning.trace import AttentionTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The authors' figures: 14 x 14 alphas upsampled x 16 and smoothed with a Gaussian of 20 pixels, on 224 pixels.
SIGMA_OF_SIDE = 20 / 224
SIGMA_OF_CELL = 20 / 16

DIM_BELOW = 3.0  # times even attention: a map whose maximum is lower does not reach full brightness
DIM_CHOSEN = 0.8  # of its brightness: a distribution beneath the cell that was drawn from it

_COLUMNS = 6
_PANEL = 1.6  # inches, a panel's longer side
_GAP = 0.09
_TITLE = 0.30  # inches above a panel, for the word
_BETA = 0.20  # inches below it
_MARGIN = 0.12
_MINIMUM_SIDE = 224  # pixels; maps of smaller views are drawn on an enlarged view, so that they stay smooth
_COLORMAP = "inferno"  # perceptually uniform, safe for colour-blind readers, and monotonic in grey print


def attention_figure(
    view: Image.Image,
    words: Sequence[str],
    trace: AttentionTrace,
    cells: CellGrid,
    *,
    title: str | None = None,
) -> Figure:
    """Return the view followed by one panel per word, the attention as colour over the greyed view.

    Every map is scaled from zero to its own maximum, or to three times even attention if that is more: maps compare in
    shape, and a map that looks everywhere stays dim. Where hard attention chose one cell, the cell is outlined and the
    distribution it was chosen from is dimmed. Save with ``figure.savefig("x.png")``, or pdf; pyplot knows nothing of
    it.

    Args:
        view: exactly the pixels the model saw (``Preprocessing.view``).
        words: T words.
        trace: of the (T,) words' steps; the gate is written beneath each panel.
        cells: where the L locations lie on the view.
        title: above all panels.

    Raises:
        ValueError: the shapes contradict each other.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    alphas = np.asarray(trace.alphas, dtype=np.float32)
    rows, columns = cells.grid_size
    if alphas.shape != (len(words), rows * columns):
        raise ValueError(
            f"alphas must be ({len(words)}, {rows * columns}) for {len(words)} words on a grid of "
            f"{rows} x {columns}, got {alphas.shape}"
        )
    gates = None if trace.betas is None else np.asarray(trace.betas, dtype=np.float32)
    if gates is not None and gates.shape != (len(words),):
        raise ValueError(f"betas must be ({len(words)},), one per word, got {gates.shape}")
    if len(chosen := trace.chosen()) != len(words):
        raise ValueError(f"locations must be ({len(words)},), one per word, got {len(chosen)}")

    layout = _Layout(len(words) + 1, view.size, with_betas=gates is not None, with_title=title is not None)
    figure = Figure(figsize=(layout.width, layout.height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    # One axes in inches, y downwards, for all panels: an axes of its own for each costs more than drawing it.
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set(xlim=(0, layout.width), ylim=(layout.height, 0), autoscale_on=False)
    if title is not None:
        _text(axes, layout.width / 2, _MARGIN + 0.11, title, size=12, fit=layout.width - 2 * _MARGIN, weight="bold")

    picture = np.asarray(view.convert("RGB"))
    _panel(axes, layout, 0, picture)
    background = _greyed(view)
    for t, word in enumerate(words):
        brightness = 1.0 if chosen[t] is None else DIM_CHOSEN
        x, y = _panel(axes, layout, t + 1, _lit(background, alphas[t], cells, brightness))
        if (location := chosen[t]) is not None:
            _outline(axes, layout, t + 1, location, cells)
        _text(axes, x + layout.panel_width / 2, y - 0.12, word, size=11, fit=layout.panel_width)
        if gates is not None:
            below = y + layout.panel_height + 0.10
            label = f"\N{GREEK SMALL LETTER BETA} {gates[t]:.2f}"
            _text(axes, x + layout.panel_width / 2, below, label, size=8.5, color="0.35")
    return figure


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


class _Layout:
    """Places of ``count`` panels in inches, in rows of equal length as far as possible."""

    def __init__(self, count: int, view_size: tuple[int, int], *, with_betas: bool, with_title: bool) -> None:
        self.rows = math.ceil(count / _COLUMNS)
        self.columns = math.ceil(count / self.rows)
        longer = max(view_size)
        self.panel_width, self.panel_height = (_PANEL * side / longer for side in view_size)
        self.step_x = self.panel_width + _GAP
        self.step_y = _TITLE + self.panel_height + (_BETA if with_betas else 0.04)
        self.top = _MARGIN / 2 + (0.28 if with_title else 0.0)
        self.width = 2 * _MARGIN + self.columns * self.step_x - _GAP
        self.height = self.top + self.rows * self.step_y + _MARGIN / 2

    def corner(self, number: int) -> tuple[float, float]:
        """Left and top of a panel's picture."""
        row, column = divmod(number, self.columns)
        return _MARGIN + column * self.step_x, self.top + row * self.step_y + _TITLE


def _panel(axes: Axes, layout: _Layout, number: int, picture: NDArray[Any]) -> tuple[float, float]:
    x, y = layout.corner(number)
    extent = (x, x + layout.panel_width, y + layout.panel_height, y)
    axes.imshow(picture, extent=extent, aspect="auto")
    return x, y


def _outline(axes: Axes, layout: _Layout, number: int, location: int, cells: CellGrid) -> None:
    """Frame a cell from outside in white on black, which shows on any picture and leaves the cell free."""
    from matplotlib.patches import Rectangle

    left, top = layout.corner(number)
    y, bottom, x, right = cells.square(location)
    down, across = layout.panel_height / cells.size[0], layout.panel_width / cells.size[1]  # inches per pixel
    white, black = 0.9, 2.0  # points
    out = white / 2 / 72
    place = (left + x * across - out, top + y * down - out)
    width, height = (right - x) * across + 2 * out, (bottom - y) * down + 2 * out
    for color, line in (("black", black), ("white", white)):
        frame = Rectangle(place, width, height, fill=False, edgecolor=color, linewidth=line)
        axes.add_patch(frame)


def _text(axes: Axes, x: float, y: float, text: str, *, size: float, fit: float | None = None, **style: Any) -> None:
    """Centred text, smaller where it would be wider than ``fit`` inches."""
    if fit is not None:
        inches_per_letter = 0.62 * size / 72  # a little more than the font's mean
        size = max(5.0, size * min(1.0, fit / (inches_per_letter * max(1, len(text)))))
    # parse_math=False: a caption may say "$ 5".
    axes.text(x, y, text, size=size, ha="center", va="center", parse_math=False, **style)


def _greyed(view: Image.Image) -> NDArray[np.float32]:
    """The view as a darker grey, (height, width, 3) in 0..1, at a size that smooth maps look smooth on."""
    scale = max(1.0, _MINIMUM_SIDE / min(view.size))
    grey = view.convert("L").resize((round(view.width * scale), round(view.height * scale)), Image.Resampling.BICUBIC)
    levels = np.asarray(grey, dtype=np.float32) / 255
    return np.repeat((0.12 + 0.55 * levels)[:, :, None], 3, axis=2)


def _lit(
    background: NDArray[np.float32], alpha: NDArray[np.float32], cells: CellGrid, brightness: float
) -> NDArray[np.uint8]:
    """The background with the map on it, (height, width, 3)."""
    strength = smooth_alphas(alpha, cells.scaled((background.shape[0], background.shape[1])))
    strength = brightness * strength / max(float(strength.max()), DIM_BELOW / len(alpha))
    levels = (strength * 255).astype(np.uint8)
    opacity = 0.8 * strength[:, :, None]
    # The colour takes on the picture's light and shade, so that what is looked at stays recognisable.
    lit = background * (1 - opacity) + map_colors()[levels] * (0.72 + 0.5 * background) * opacity
    return (lit.clip(max=1) * 255).astype(np.uint8)


@functools.cache
def map_colors() -> NDArray[np.float32]:
    """Return the colours of a map from dark to bright, (256, 3) in 0..1."""
    from matplotlib import colormaps

    return np.asarray(colormaps[_COLORMAP](np.linspace(0, 0.93, 256)), dtype=np.float32)[:, :3]
