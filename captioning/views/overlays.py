"""The paper's figure: the image, followed by the attention at each word (Xu et al. 2015, Fig. 2 and 3)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioning.cells import CellGrid
from captioning.errors import check_choice
from captioning.trace import AttentionTrace, map_fields
from captioning.views.maps import NEARLY_EVEN, Style, paint, smooth_alphas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 7
_PIXELS = 448  # the most pixels of a panel's longer side
_GRAY = "0.35"
# Lengths in inches:
_PANEL = 1.75  # a panel's longer side
_WORD, _WORD_WITH_DETAILS = 0.75, 1.3  # least width for a word, whose panel may be narrower
_FIGURE = 6.2  # least width of the figure
_SCALE = 1.2  # width of the scale without its text
_GAP = 0.09  # between panels
_ABOVE = 0.27  # above a panel, for the word
_NOTE = 0.13  # height of a line below a panel
_MARGIN = 0.3  # around the figure
_LINE, _LETTER = 0.2, 0.13  # height and width of the caption's letters

Box = tuple[float, float, float, float]
"""(left, top, right, bottom) on a picture, where y grows downward"""

WHOLE: Box = (0.0, 0.0, 1.0, 1.0)


class ModelAttention(NamedTuple):
    """A model's attention at T words."""

    trace: AttentionTrace  # of (T,) steps
    cells: CellGrid  # on the view
    view_box: Box = WHOLE  # the view's box in the photo, in fractions of the photo's sides (``Preprocessing.view_box``)


def attention_figure(
    photo: Image.Image,
    words: Sequence[str],
    attention_by_model: Mapping[str, ModelAttention],
    *,
    text: str,
    style: Style = "color",
    details: bool = False,
) -> Figure:
    """Return the image and its caption, followed by a panel per word with the attention over the model's view.

    All maps of attention have one scale, which ends at the greatest attention of all words; maps of evidence have
    another. The scales are drawn at the bottom. If hard attention chose a cell, only this cell is painted and outlined.
    A map that prefers no location is labeled "nearly even". pyplot ignores the figure.

    Args:
        photo: The whole image, on which the first model's view is outlined.
        words: T words.
        attention_by_model: By label, the attention of models at these words; a row of panels for each.
        text: The caption as written.
        style, details: As in ``Caption.figure``.
    """
    check_choice(Style, style=style)
    photo, first = photo.convert("RGB"), next(iter(attention_by_model.values()))
    strips = [x for item in attention_by_model.items() for x in _strips(*item, photo, details)]
    ends: dict[str, float] = {}  # upper ends of the scales of attention and evidence
    for strip in strips:
        spread = [weights.max() for weights, cell in zip(strip.weights, strip.chosen, strict=True) if cell is None]
        ends[strip.kind] = float(max([ends.get(strip.kind, 0.0), *spread]))
    figure, photo_axes, panels = _empty_figure(text, words, strips, _WORD_WITH_DETAILS if details else _WORD)
    _draw_photo(photo_axes, photo, first.view_box)
    for step, column in enumerate(panels):
        starts_line = step == 0 or column[0].get_position().y0 < panels[step - 1][0].get_position().y0
        for strip, axes in zip(strips, column, strict=True):
            axes.imshow(strip.painted(step, ends[strip.kind] or 1.0, style), aspect="auto")
            axes.set_xlabel(strip.notes[step], fontsize=8, color=_GRAY, labelpad=2)
            if len(strips) > 1 and starts_line:
                axes.set_ylabel(strip.label, fontsize=8, color=_GRAY)
            if (location := strip.chosen[step]) is not None:
                _outline(axes, strip.cells.square(location))
    _draw_scale(figure, ends, style)
    return figure


def _empty_figure(
    text: str, words: Sequence[str], strips: Sequence[_Strip], word_width: float
) -> tuple[Figure, Axes, list[list[Axes]]]:
    """Return a figure with a caption, the axes of the photo, and for each word a column of axes with the word above.

    The photo takes the space of two by two panels, unless all words fit beside it. A word has at least ``word_width``
    inches, also above a panel that is narrower.
    """
    from matplotlib.figure import Figure

    beside = len(strips) == 1 and len(words) < _COLUMNS
    photo_columns, photo_lines = 1 if beside else 2, 1 if beside or len(strips) > 1 else 2
    lines = max(photo_lines, -(-(len(words) + photo_columns * photo_lines) // _COLUMNS))
    columns = max(photo_columns, -(-(len(words) + photo_columns * photo_lines) // lines))
    aspect = strips[0].cells.size[1] / strips[0].cells.size[0]
    panel = _PANEL * min(1.0, aspect), _PANEL / max(1.0, aspect)  # width, height
    notes = max((len(note.splitlines()) for strip in strips for note in strip.notes), default=0)
    word_width, below = max(panel[0], word_width), _GAP + _NOTE * notes
    column, row_height = word_width + _GAP, panel[1] + below
    line = _ABOVE + len(strips) * row_height
    width = max(_FIGURE, 2 * _MARGIN + columns * column)
    caption = textwrap.fill(text, width=int((width - 2 * _MARGIN) / _LETTER))
    left, top = (width - columns * column + _GAP) / 2, _MARGIN + _ABOVE + _LINE * caption.count("\n")
    height = _MARGIN - _ABOVE + top + lines * line
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    figure.suptitle(caption, y=1 - 0.1 / height, fontsize=12, weight="bold", va="top", parse_math=False)

    def add_axes(x: float, y: float, axes_width: float, axes_height: float) -> Axes:
        """Add axes at inches from the upper left corner of the photo."""
        box = (left + x) / width, 1 - (top + y + axes_height) / height, axes_width / width, axes_height / height
        return figure.add_axes(box, xticks=[], yticks=[], frame_on=False)

    photo = add_axes(0, 0, photo_columns * column - (_GAP if beside else _MARGIN), photo_lines * line - _ABOVE - below)
    places = [(y, x) for y in range(lines) for x in range(columns) if y >= photo_lines or x >= photo_columns]
    panels = []
    for word, (y, x) in zip(words, places, strict=False):
        corner = x * column + (word_width - panel[0]) / 2, y * line
        panels.append([add_axes(corner[0], corner[1] + row * row_height, *panel) for row in range(len(strips))])
        size = 11 * min(1.0, 10 * word_width / max(1, len(word)))  # 10 letters fit in an inch
        panels[-1][0].set_title(word, fontsize=max(5.0, size), pad=4, parse_math=False)
    return figure, photo, panels


class _Strip(NamedTuple):
    """A row of panels, one for each word."""

    label: str
    kind: str  # attention or evidence
    background: NDArray[np.float32]  # the model's view of the photo
    cells: CellGrid  # on the background
    weights: NDArray[np.float32]  # (T, L), attention
    chosen: list[int | None]  # the cell that is painted alone
    notes: list[str]  # beneath the panels

    def painted(self, step: int, end: float, style: Style) -> NDArray[np.uint8]:
        weights, cell = self.weights[step], self.chosen[step]
        if cell is not None:
            weights, end = np.arange(weights.size) == cell, 1.0
        return paint(self.background, smooth_alphas(weights, self.cells), end, style)


def _strips(name: str, attention: ModelAttention, photo: Image.Image, details: bool) -> list[_Strip]:
    """Return the rows of panels of a model."""
    trace, background = map_fields(attention.trace, np.asarray), _background(photo, attention.view_box)
    cells = attention.cells.scaled(background.shape[:2])
    maps = {"attention": trace.alphas}
    if details and trace.evidence is not None:
        maps["evidence"] = trace.evidence
    strips = []
    for kind, weights in maps.items():
        label = ": ".join(filter(None, (name, kind if len(maps) > 1 else "")))
        is_alphas = kind == "attention"
        chosen = [cell if is_alphas else None for cell in trace.chosen()]
        notes = _notes(weights, chosen, trace.betas if is_alphas else None, details)
        strips.append(_Strip(label, kind, background, cells, weights, chosen, notes))
    return strips


def _notes(weights: NDArray[np.float32], chosen: list[int | None], betas: Any, details: bool) -> list[str]:
    """Return the text beneath the panel of each word."""
    notes = []
    for step, cell in enumerate(chosen):
        alpha = weights[step]
        most = f"at most {alpha.max():#.2g}" if cell is None else f"{alpha[cell]:#.2g} there"
        beta = "" if betas is None else f"\N{GREEK SMALL LETTER BETA} {betas[step]:.2f} · "
        is_even = cell is None and alpha.max() * alpha.size < NEARLY_EVEN
        notes.append("\n".join(filter(None, (beta + most if details else "", "nearly even" if is_even else ""))))
    return notes


def _background(photo: Image.Image, view_box: Box) -> NDArray[np.float32]:
    """Return the model's view of the image, (height, width, 3) in 0 .. 1, large enough for smooth maps."""
    left, top, right, bottom = np.multiply(view_box, photo.size * 2).tolist()
    scale = _PIXELS / max(right - left, bottom - top)
    size = max(1, round((right - left) * scale)), max(1, round((bottom - top) * scale))
    view = photo.resize(size, Image.Resampling.BICUBIC, box=(left, top, right, bottom))
    return np.asarray(view, dtype=np.float32) / np.float32(255)


def _draw_photo(axes: Axes, photo: Image.Image, view_box: Box) -> None:
    """Draw the whole image, dimmed outside the model's view."""
    photo = photo.copy()
    photo.thumbnail((2 * _PIXELS, 2 * _PIXELS), Image.Resampling.LANCZOS)
    pixels = np.asarray(photo)
    if view_box != WHOLE:
        left, top, right, bottom = map(round, np.multiply(view_box, photo.size * 2).tolist())
        view, pixels = pixels[top:bottom, left:right], pixels // 2
        pixels[top:bottom, left:right] = view
        _outline(axes, (left, top, right, bottom))
    axes.imshow(pixels, extent=(0, photo.width, photo.height, 0))
    axes.set_anchor("N")


def _draw_scale(figure: Figure, ends: Mapping[str, float], style: Style) -> None:
    """Draw the scale of all maps at the bottom."""
    width, height = figure.get_size_inches()
    axes = figure.add_axes((_MARGIN / width, 0.15 / height, _SCALE / width, 0.1 / height))
    white, ramp = np.ones((1, 256, 3), dtype=np.float32), np.linspace(0, 1, 256, dtype=np.float32)[None]
    axes.imshow(paint(white, ramp, 1.0, style), aspect="auto")
    axes.set_axis_off()
    text = "; ".join(f"{kind} per location, from 0 to {end or 1:#.2g}" for kind, end in ends.items())
    figure.text((_SCALE + 1.5 * _MARGIN) / width, 0.2 / height, text, size=8, color=_GRAY, va="center")


def _outline(axes: Axes, box: Box) -> None:
    """Frame a box in white on black, which is visible on any picture."""
    from matplotlib.patches import Rectangle

    left, top, right, bottom = box
    for color, line in (("black", 2.0), ("white", 0.9)):
        style: dict[str, Any] = {"edgecolor": color, "linewidth": line, "clip_on": False}
        axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, **style))
