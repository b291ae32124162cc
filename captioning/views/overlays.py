"""The paper's figure: the image, followed by the attention at each word (Xu et al. 2015, Fig. 2 and 3)."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioning.cells import CellGrid
from captioning.errors import check_choice, warn_once
from captioning.trace import AttentionTrace
from captioning.views.maps import Style, is_nearly_even, paint, smooth_alphas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 7
_PANEL = 1.75  # inches, a panel's longer side
_COLUMN_WIDTH = 0.75  # inches, the least width for a word, whose panel may be narrower; for a word with numbers 1.3
_FIGURE = 6.2  # inches, the least width, for the scale with its text
_GAP, _ABOVE, _NOTE, _MARGIN = 0.09, 0.27, 0.13, 0.3  # inches between panels, above, a line below, around all
_LINE, _LETTER = 0.2, 0.13  # inches, of the caption
_PIXELS = 448  # most of a panel's longer side
_GREY = "0.35"

Box = tuple[float, float, float, float]
"""(left, top, right, bottom)"""

WHOLE: Box = (0.0, 0.0, 1.0, 1.0)


class Look(NamedTuple):
    """A model's attention at T words."""

    trace: AttentionTrace  # of (T,) steps
    cells: CellGrid  # on the view
    region: Box = WHOLE  # the view's box in the photo, in fractions of the photo's sides (``Preprocessing.region``)


def attention_figure(
    photo: Image.Image,
    words: Sequence[str],
    looks: Mapping[str, Look],
    *,
    style: Style = "color",
    text: str | None = None,
    heads: bool = False,
    details: bool = False,
) -> Figure:
    """Return the image and its caption, followed by a panel per word with the attention over the model's view.

    All maps of attention have one scale, which ends at the greatest attention of all words; maps of evidence have
    another. The scales are drawn at the bottom. If hard attention chose a cell, only this cell is painted and outlined.
    A map that prefers no location is labelled "nearly even". Save with ``save_figure``; pyplot ignores the figure.

    Args:
        photo: The whole image, on which the first model's view is outlined.
        words: T words.
        looks: By label, the attention of models at these words; a row of panels for each.
        style: "color": the map's colours on the image. "paper": white on the grey image, as in the paper's Fig. 2.
        text: The caption as written; by default the words with spaces between them.
        heads: Show the attention of each head beneath the heads' mean.
        details: Write beta and the greatest attention beneath each panel, and show the evidence beneath the alphas.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_choice(Style, style=style)
    photo, first_look = photo.convert("RGB"), next(iter(looks.values()))
    maps = [row for label, look in looks.items() for row in _maps(label, look, photo, heads=heads, details=details)]
    ends: dict[str, float] = {}  # of the scales of attention and evidence
    for row in maps:
        spread = [weights.max() for weights, cell in zip(row.weights, row.chosen, strict=True) if cell is None]
        ends[row.kind] = float(max([ends.get(row.kind, 0.0), *spread]))
    notes = [row.notes(details) for row in maps]

    # The image takes the space of two by two panels, unless all words fit beside it.
    one_line = len(maps) == 1 and len(words) < _COLUMNS
    photo_columns, photo_lines = 1 if one_line else 2, 1 if one_line or len(maps) > 1 else 2
    count = len(words) + photo_columns * photo_lines
    lines = max(photo_lines, -(-count // _COLUMNS))
    columns = max(photo_columns, -(-count // lines))
    positions = [(y, x) for y in range(lines) for x in range(columns) if y >= photo_lines or x >= photo_columns]

    (down, right), lines_below = maps[0].cells.size, max((len(note) for row in notes for note in row), default=0)
    below = _GAP + _NOTE * lines_below
    aspect = right / down
    width, height = _PANEL * min(1.0, aspect), _PANEL / max(1.0, aspect)  # of a panel, in inches
    column_width = max(width, 1.3 if details else _COLUMN_WIDTH)
    line_height = _ABOVE + len(maps) * (height + below)
    across = max(_FIGURE, 2 * _MARGIN + columns * (column_width + _GAP))
    caption = textwrap.fill(" ".join(words) if text is None else text, width=int((across - 2 * _MARGIN) / _LETTER))
    above = _MARGIN + _ABOVE + _LINE * caption.count("\n")
    size = across, _MARGIN - _ABOVE + above + lines * line_height
    figure = Figure(figsize=size, dpi=150, facecolor="white")
    FigureCanvasAgg(figure)

    def panel(y: float, x: float, w: float, h: float) -> Axes:
        """Return axes whose upper left corner lies y and x inches from the first panel's."""
        left, top = (across - columns * (column_width + _GAP) + _GAP) / 2 + x, above + y
        axes = figure.add_axes((left / size[0], 1 - (top + h) / size[1], w / size[0], h / size[1]))
        axes.set(xticks=[], yticks=[], frame_on=False)
        return axes

    figure.suptitle(caption, y=1 - 0.1 / size[1], fontsize=12, weight="bold", va="top", parse_math=False)
    photo_size = (
        photo_columns * (column_width + _GAP) - (_GAP if one_line else _MARGIN),
        photo_lines * line_height - _ABOVE - below,
    )
    _draw_photo(panel(0, 0, *photo_size), photo, first_look.region)
    for step, word in enumerate(words):
        line, column = positions[step]
        is_first = step == 0 or line > positions[step - 1][0]
        for number, row in enumerate(maps):
            left = column * (column_width + _GAP) + (column_width - width) / 2
            axes = panel(line * line_height + number * (height + below), left, width, height)
            axes.imshow(row.painted(step, ends[row.kind] or 1.0, style), aspect="auto")
            if number == 0:
                letters = 10 * column_width  # that fit
                axes.set_title(
                    word, fontsize=max(5.0, 11 * min(1.0, letters / max(1, len(word)))), pad=4, parse_math=False
                )
            if len(maps) > 1 and is_first:
                axes.set_ylabel(row.label, fontsize=8, color=_GREY)
            if (location := row.chosen[step]) is not None:
                _outline(axes, _cell(row.cells, location))
            axes.set_xlabel("\n".join(notes[number][step]), fontsize=8, color=_GREY, labelpad=2)
    _draw_scale(figure, ends, style)
    return figure


def save_figure(figure: Figure, target: Path | IO[bytes], **options: Any) -> None:
    """Save a figure; if the font lacks characters, one line says what to do instead of a warning for each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "Glyph ")
        figure.savefig(target, **options)
    for warning in caught:
        if str(warning.message).startswith("Glyph "):
            warn_once(
                "overlays: the font lacks characters of these captions; name one that has them to matplotlib, as by "
                "the line  font.family: DejaVu Sans, Noto Sans CJK JP  in a file matplotlibrc here"
            )
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


class _Map(NamedTuple):
    """A row of panels, one for each word."""

    label: str
    kind: str  # attention or evidence
    background: NDArray[np.float32]  # the model's view of the photo
    weights: NDArray[np.float32]  # (T, L), attention
    cells: CellGrid  # on the background
    chosen: list[int | None]  # the cell that is painted alone
    betas: NDArray[np.float32] | None

    def painted(self, step: int, end: float, style: Style) -> NDArray[np.uint8]:
        weights, cell = self.weights[step], self.chosen[step]
        if cell is not None:
            weights, end = np.arange(weights.size) == cell, 1.0
        return paint(self.background, smooth_alphas(weights, self.cells), end, style)

    def notes(self, details: bool) -> list[list[str]]:
        """Return the lines beneath the panel of each word."""
        notes: list[list[str]] = []
        for step, (weights, cell) in enumerate(zip(self.weights, self.chosen, strict=True)):
            most = f"at most {weights.max():#.2g}" if cell is None else f"{weights[cell]:#.2g} there"
            beta = "" if self.betas is None else f"\N{GREEK SMALL LETTER BETA} {self.betas[step]:.2f} · "
            notes.append([beta + most] * details + ["nearly even"] * (cell is None and is_nearly_even(weights)))
        return notes


def _maps(name: str, look: Look, photo: Image.Image, *, heads: bool, details: bool) -> list[_Map]:
    """Return the rows of panels of a model."""
    trace, background = look.trace.map(np.asarray), _background(photo, look.region)
    on_view, named = look.cells.scaled(background.shape[:2]), _named_maps(trace, heads=heads, details=details)
    rows: list[_Map] = []
    for kind, weights in named.items():
        label = ": ".join(filter(None, (name, kind * (len(named) > 1))))
        of = "evidence" if weights is trace.evidence else "attention"
        chosen = [cell if weights is trace.alphas else None for cell in trace.chosen()]
        rows.append(_Map(label, of, background, weights, on_view, chosen, None if rows else trace.betas))
    return rows


def _named_maps(trace: AttentionTrace, *, heads: bool, details: bool) -> dict[str, NDArray[np.float32]]:
    """Return the maps of every word by name, each (T, L)."""
    if heads:
        count = trace.heads.shape[1]
        return {f"mean of {count} heads": trace.alphas} | {f"head {k + 1}": trace.heads[:, k] for k in range(count)}
    evidence = {"evidence": trace.evidence} if details and trace.evidence is not None else {}
    return {"attention": trace.alphas} | evidence


def _background(photo: Image.Image, region: Box) -> NDArray[np.float32]:
    """Return the model's view of the image, (height, width, 3) in 0..1, large enough for smooth maps."""
    left, top, right, bottom = _in_pixels(region, photo.size)
    width, height = right - left, bottom - top
    scale = _PIXELS / max(width, height)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    view = photo.resize(size, Image.Resampling.BICUBIC, box=(left, top, right, bottom))
    return np.asarray(view, dtype=np.float32) / np.float32(255)


def _draw_photo(axes: Axes, photo: Image.Image, region: Box) -> None:
    """Draw the whole image, dimmed outside the model's view."""
    photo = photo.copy()
    photo.thumbnail((2 * _PIXELS, 2 * _PIXELS), Image.Resampling.LANCZOS)
    pixels = np.asarray(photo)
    if region != WHOLE:
        left, top, right, bottom = (round(side) for side in _in_pixels(region, photo.size))
        dimmed = pixels // 2
        dimmed[top:bottom, left:right] = pixels[top:bottom, left:right]
        pixels = dimmed
        _outline(axes, (left, top, right, bottom))
    axes.imshow(pixels, extent=(0, photo.width, photo.height, 0))
    axes.set_anchor("N")


def _draw_scale(figure: Figure, ends: Mapping[str, float], style: Style) -> None:
    """Draw the scale of all maps at the bottom."""
    width, height = figure.get_figwidth(), figure.get_figheight()
    axes = figure.add_axes((_MARGIN / width, 0.15 / height, min(1.2, width / 4) / width, 0.1 / height))
    white, ramp = np.ones((1, 256, 3), dtype=np.float32), np.linspace(0, 1, 256, dtype=np.float32)[None]
    axes.imshow(paint(white, ramp, 1.0, style), aspect="auto")
    axes.set_axis_off()
    text = "; ".join(f"{kind} per location, from 0 to {end or 1:#.2g}" for kind, end in ends.items())
    figure.text((min(1.2, width / 4) + 1.5 * _MARGIN) / width, 0.2 / height, text, size=8, color=_GREY, va="center")


def _in_pixels(box: Box, size: tuple[int, int]) -> Box:
    """Return a box in fractions of a picture's (width, height) in pixels."""
    (left, top, right, bottom), (width, height) = box, size
    return left * width, top * height, right * width, bottom * height


def _cell(cells: CellGrid, location: int) -> Box:
    """Return the box of a cell in pixels of the view."""
    top, bottom, left, right = cells.square(location)
    return left, top, right, bottom


def _outline(axes: Axes, box: Box) -> None:
    """Frame a box in white on black, which is visible on any picture."""
    from matplotlib.patches import Rectangle

    left, top, right, bottom = box
    for color, line in (("black", 2.0), ("white", 0.9)):
        style: dict[str, Any] = {"edgecolor": color, "linewidth": line, "clip_on": False}
        axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, **style))
