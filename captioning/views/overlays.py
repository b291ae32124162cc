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
_PANEL_SIDE = 1.75  # a panel's longer side
_WORD_WIDTH, _DETAILED_WORD_WIDTH = 0.75, 1.3  # least width for a word, whose panel may be narrower
_FIGURE_WIDTH = 6.2  # least width of the figure
_SCALE_WIDTH = 1.2  # without the text of the scale
_GAP = 0.09  # between panels
_WORD_HEIGHT = 0.27  # above a panel
_NOTE_HEIGHT = 0.13  # of a line below a panel
_MARGIN = 0.3  # around the figure
_TEXT_LINE, _LETTER_WIDTH = 0.2, 0.13  # height of the caption's lines, width of its letters

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

    If hard attention chose a cell, only this cell is painted and outlined, with its attention beneath. All other maps
    of attention have one scale, up to the greatest attention among them; maps of evidence have another. The scales are
    drawn at the bottom. A map that prefers no location is labeled "nearly even". pyplot does not know the figure.

    Args:
        photo: The whole image, on which the first model's view is outlined.
        words: T words.
        attention_by_model: The attention of models at these words, by the labels of their rows of panels.
        text: The caption as people write it.
        style, details: As in ``Caption.figure``.
    """
    check_choice(Style, style=style)
    photo = photo.convert("RGB")
    strips = [strip for item in attention_by_model.items() for strip in _strips(*item, photo, details)]
    scale_maxima: dict[str, float] = {}  # of attention and evidence
    for strip in strips:
        maxima = [weights.max() for weights, cell in zip(strip.weights, strip.chosen, strict=True) if cell is None]
        scale_maxima[strip.kind] = float(max([scale_maxima.get(strip.kind, 0.0), *maxima]))
    figure, photo_axes, panels = _empty_figure(text, words, strips, _DETAILED_WORD_WIDTH if details else _WORD_WIDTH)
    _draw_photo(photo_axes, photo, next(iter(attention_by_model.values())).view_box)
    for step, column in enumerate(panels):
        starts_line = step == 0 or column[0].get_position().y0 < panels[step - 1][0].get_position().y0
        for strip, axes in zip(strips, column, strict=True):
            axes.imshow(strip.paint_step(step, scale_maxima[strip.kind] or 1.0, style), aspect="auto")
            axes.set_xlabel(strip.notes[step], fontsize=8, color=_GRAY, labelpad=2)
            if len(strips) > 1 and starts_line:
                axes.set_ylabel(strip.label, fontsize=8, color=_GRAY)
            if (location := strip.chosen[step]) is not None:
                _outline(axes, strip.cells.box(location))
    _draw_scale(figure, scale_maxima, style, any(cell is not None for strip in strips for cell in strip.chosen))
    return figure


def _empty_figure(
    text: str, words: Sequence[str], strips: Sequence[_Strip], word_width: float
) -> tuple[Figure, Axes, list[list[Axes]]]:
    """Return a figure with a caption, the axes of the photo, and for each word a column of axes with the word above.

    The photo is two columns wide, unless all words fit beside it in one line. A word has ``word_width`` inches or more,
    also above a narrower panel.
    """
    from matplotlib.figure import Figure

    is_one_line = len(strips) == 1 and len(words) < _COLUMNS
    photo_columns = 1 if is_one_line else 2
    photo_lines = 1 if is_one_line or len(strips) > 1 else 2
    lines = max(photo_lines, -(-(len(words) + photo_columns * photo_lines) // _COLUMNS))
    columns = max(photo_columns, -(-(len(words) + photo_columns * photo_lines) // lines))
    aspect = strips[0].cells.size[1] / strips[0].cells.size[0]
    panel_width, panel_height = _PANEL_SIDE * min(1.0, aspect), _PANEL_SIDE / max(1.0, aspect)
    note_height = _GAP + _NOTE_HEIGHT * max((len(note.splitlines()) for s in strips for note in s.notes), default=0)
    row_height = panel_height + note_height
    line_height = _WORD_HEIGHT + len(strips) * row_height
    word_width = max(panel_width, word_width)
    column_width = word_width + _GAP
    width = max(_FIGURE_WIDTH, 2 * _MARGIN + columns * column_width)
    caption = textwrap.fill(text, width=int((width - 2 * _MARGIN) / _LETTER_WIDTH))
    left = (width - columns * column_width + _GAP) / 2
    top = _MARGIN + _WORD_HEIGHT + _TEXT_LINE * caption.count("\n")
    height = _MARGIN - _WORD_HEIGHT + top + lines * line_height
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    figure.suptitle(caption, y=1 - 0.1 / height, fontsize=12, weight="bold", va="top", parse_math=False)

    def add_axes(x: float, y: float, axes_width: float, axes_height: float) -> Axes:
        """Add axes at inches from the upper left corner of the photo."""
        box = (left + x) / width, 1 - (top + y + axes_height) / height, axes_width / width, axes_height / height
        return figure.add_axes(box, xticks=[], yticks=[], frame_on=False)

    photo_width = photo_columns * column_width - (_GAP if is_one_line else _MARGIN)
    photo_axes = add_axes(0, 0, photo_width, photo_lines * line_height - _WORD_HEIGHT - note_height)
    positions = [(y, x) for y in range(lines) for x in range(columns) if y >= photo_lines or x >= photo_columns]
    panels = []
    for word, (line, column) in zip(words, positions, strict=False):
        x, y = column * column_width + (word_width - panel_width) / 2, line * line_height
        panels.append([add_axes(x, y + row * row_height, panel_width, panel_height) for row in range(len(strips))])
        size = 11 * min(1.0, 10 * word_width / max(1, len(word)))  # 10 letters fit in an inch
        panels[-1][0].set_title(word, fontsize=max(5.0, size), pad=4, parse_math=False)
    return figure, photo_axes, panels


class _Strip(NamedTuple):
    """A row of panels, one for each word."""

    label: str
    kind: str  # attention or evidence
    background: NDArray[np.float32]  # the model's view of the photo
    cells: CellGrid  # on the background
    weights: NDArray[np.float32]  # (T, L), of this kind
    chosen: list[int | None]  # at each word, the cell that is painted alone; None if the whole map is painted
    notes: list[str]  # the text beneath each panel

    def paint_step(self, step: int, maximum: float, style: Style) -> NDArray[np.uint8]:
        weights, cell = self.weights[step], self.chosen[step]
        if cell is not None:
            weights, maximum = np.arange(weights.size) == cell, 1.0
        return paint(self.background, smooth_alphas(weights, self.cells), maximum, style)


def _strips(name: str, attention: ModelAttention, photo: Image.Image, details: bool) -> list[_Strip]:
    """Return the rows of panels of a model."""
    trace = map_fields(attention.trace, np.asarray)
    background = _background(photo, attention.view_box)
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
    for step, (alpha, cell) in enumerate(zip(weights, chosen, strict=True)):
        strongest = f"at most {alpha.max():#.2g}" if cell is None else f"{alpha[cell]:#.2g} there"
        beta = "" if betas is None else f"\N{GREEK SMALL LETTER BETA} {betas[step]:.2f} · "
        is_even = cell is None and alpha.max() * alpha.size < NEARLY_EVEN
        numbers = beta + strongest if details else "" if cell is None else strongest
        notes.append("\n".join(filter(None, (numbers, "nearly even" if is_even else ""))))
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


def _draw_scale(figure: Figure, maxima: Mapping[str, float], style: Style, has_chosen: bool) -> None:
    """Draw the scale of all maps at the bottom; its text has the maximum of each kind of map."""
    width, height = figure.get_size_inches()
    axes = figure.add_axes((_MARGIN / width, 0.15 / height, _SCALE_WIDTH / width, 0.1 / height))
    ramp = np.linspace(0, 1, 256, dtype=np.float32)[None]
    axes.imshow(paint(np.ones((1, 256, 3), dtype=np.float32), ramp, 1.0, style), aspect="auto")
    axes.set_axis_off()
    lines = [f"{kind} per location, from 0 to {m or 1:#.2g}" for kind, m in maxima.items() if m or not has_chosen]
    lines += ["outlined: the chosen location, painted alone"] if has_chosen else []
    figure.text(
        (_SCALE_WIDTH + 1.5 * _MARGIN) / width, 0.2 / height, "; ".join(lines), size=8, color=_GRAY, va="center"
    )


def _outline(axes: Axes, box: Box) -> None:
    """Frame a box in white on black, which is visible on any picture."""
    from matplotlib.patches import Rectangle

    left, top, right, bottom = box
    for color, line in (("black", 2.0), ("white", 0.9)):
        style: dict[str, Any] = {"edgecolor": color, "linewidth": line, "clip_on": False}
        axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, **style))
