"""The paper's figure: the image, followed by the attention at each word (Xu et al. 2015, Fig. 2 and 3)."""

from __future__ import annotations

import itertools
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
_WORD, _WORD_WITH_DETAILS = 0.75, 1.3  # inches, the least width for a word, whose panel may be narrower
_FIGURE = 6.2  # inches, the least width, for the scale with its text
_GAP, _ABOVE, _NOTE, _MARGIN = 0.09, 0.27, 0.13, 0.3  # inches between panels, above, a line below, around all
_LINE, _LETTER = 0.2, 0.13  # inches, of the caption
_PIXELS = 448  # most of a panel's longer side
_GRAY = "0.35"
_BARE: dict[str, Any] = {"xticks": [], "yticks": [], "frame_on": False}  # axes with nothing but a picture

Box = tuple[float, float, float, float]
"""(left, top, right, bottom) on a picture, where y grows downwards"""

WHOLE: Box = (0.0, 0.0, 1.0, 1.0)


class Look(NamedTuple):
    """A model's attention at T words."""

    trace: AttentionTrace  # of (T,) steps
    cells: CellGrid  # on the view
    region: Box = WHOLE  # the view's box in the photo, in fractions of the photo's sides (``Preprocessing.region``)


class Layout:
    """Where the photo lies and, for each word, a column of ``rows`` panels, in inches.

    ``aspect`` is the width of a panel divided by its height, ``notes`` the largest number of lines beneath a panel, and
    ``word`` the least width for a word, whose panel may be narrower.
    """

    def __init__(self, text: str, words: int, rows: int, *, aspect: float, notes: int, word: float) -> None:
        # The photo takes the space of two by two panels, unless all words fit beside it.
        beside = rows == 1 and words < _COLUMNS
        photo_columns, photo_lines = 1 if beside else 2, 1 if beside or rows > 1 else 2
        lines = max(photo_lines, -(-(words + photo_columns * photo_lines) // _COLUMNS))
        columns = max(photo_columns, -(-(words + photo_columns * photo_lines) // lines))
        grid = ((y, x) for y in range(lines) for x in range(columns) if y >= photo_lines or x >= photo_columns)
        self.positions = list(itertools.islice(grid, words))  # of the words, (line, column)
        self._panel = _PANEL * min(1.0, aspect), _PANEL / max(1.0, aspect)
        self.word, below = max(self._panel[0], word), _GAP + _NOTE * notes
        self._column, self._row = self.word + _GAP, self._panel[1] + below
        self._line = _ABOVE + rows * self._row
        self.width = max(_FIGURE, 2 * _MARGIN + columns * self._column)
        self.caption = textwrap.fill(text, width=int((self.width - 2 * _MARGIN) / _LETTER))
        self._left = (self.width - columns * self._column + _GAP) / 2
        self._above = _MARGIN + _ABOVE + _LINE * self.caption.count("\n")
        self.height = _MARGIN - _ABOVE + self._above + lines * self._line
        width = photo_columns * self._column - (_GAP if beside else _MARGIN)
        self.photo = self._box(0, 0, width, photo_lines * self._line - _ABOVE - below)

    def panel(self, step: int, row: int) -> Box:
        """Return the box of a word's panel, (left, bottom, width, height) in fractions of the figure."""
        line, column = self.positions[step]
        left = column * self._column + (self.word - self._panel[0]) / 2
        return self._box(left, line * self._line + row * self._row, *self._panel)

    def _box(self, x: float, y: float, width: float, height: float) -> Box:
        top = self._above + y
        left, bottom = (self._left + x) / self.width, 1 - (top + height) / self.height
        return left, bottom, width / self.width, height / self.height


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
    A map that prefers no location is labeled "nearly even". Save with ``save_figure``; pyplot ignores the figure.

    Args:
        photo: The whole image, on which the first model's view is outlined.
        words: T words.
        looks: By label, the attention of models at these words; a row of panels for each.
        style: "color": the map's colors on the image. "paper": white on the gray image, as in the paper's Fig. 2.
        text: The caption as written; by default the words with spaces between them.
        heads: Show the attention of each head beneath the heads' mean.
        details: Write beta and the greatest attention beneath each panel, and show the evidence beneath the alphas.
    """
    from matplotlib.figure import Figure

    check_choice(Style, style=style)
    photo, first_look = photo.convert("RGB"), next(iter(looks.values()))
    rows = [row for label, look in looks.items() for row in _rows(label, look, photo, heads=heads, details=details)]
    ends: dict[str, float] = {}  # of the scales of attention and evidence
    for row in rows:
        spread = [weights.max() for weights, cell in zip(row.weights, row.chosen, strict=True) if cell is None]
        ends[row.kind] = float(max([ends.get(row.kind, 0.0), *spread]))
    height, width = rows[0].cells.size
    notes = max((len(note.splitlines()) for row in rows for note in row.notes), default=0)
    least, text = _WORD_WITH_DETAILS if details else _WORD, " ".join(words) if text is None else text
    layout = Layout(text, len(words), len(rows), aspect=width / height, notes=notes, word=least)
    figure = Figure(figsize=(layout.width, layout.height), dpi=150, facecolor="white")
    figure.suptitle(layout.caption, y=1 - 0.1 / layout.height, fontsize=12, weight="bold", va="top", parse_math=False)
    _draw_photo(figure.add_axes(layout.photo, **_BARE), photo, first_look.region)
    for step, word in enumerate(words):
        for number, row in enumerate(rows):
            axes = figure.add_axes(layout.panel(step, number), **_BARE)
            axes.imshow(row.painted(step, ends[row.kind] or 1.0, style), aspect="auto")
            axes.set_xlabel(row.notes[step], fontsize=8, color=_GRAY, labelpad=2)
            if number == 0:
                size = 11 * min(1.0, 10 * layout.word / max(1, len(word)))  # 10 letters fit in an inch
                axes.set_title(word, fontsize=max(5.0, size), pad=4, parse_math=False)
            if len(rows) > 1 and (step == 0 or layout.positions[step][0] > layout.positions[step - 1][0]):
                axes.set_ylabel(row.label, fontsize=8, color=_GRAY)
            if (location := row.chosen[step]) is not None:
                top, bottom, left, right = row.cells.square(location)
                _outline(axes, (left, top, right, bottom))
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


class _Row(NamedTuple):
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


def _rows(name: str, look: Look, photo: Image.Image, *, heads: bool, details: bool) -> list[_Row]:
    """Return the rows of panels of a model."""
    trace, background = look.trace.map(np.asarray), _background(photo, look.region)
    maps = {"attention": trace.alphas}
    if heads:
        count = trace.heads.shape[1]
        maps = {f"mean of {count} heads": trace.alphas} | {f"head {k + 1}": trace.heads[:, k] for k in range(count)}
    elif details and trace.evidence is not None:
        maps["evidence"] = trace.evidence
    rows = []
    for title, weights in maps.items():
        label = ": ".join(filter(None, (name, title * (len(maps) > 1))))
        first = weights is trace.alphas
        chosen = [cell if first else None for cell in trace.chosen()]
        notes = _notes(weights, chosen, trace.betas if first else None, details)
        kind = "evidence" if weights is trace.evidence else "attention"
        rows.append(_Row(label, kind, background, look.cells.scaled(background.shape[:2]), weights, chosen, notes))
    return rows


def _notes(weights: NDArray[np.float32], chosen: list[int | None], betas: Any, details: bool) -> list[str]:
    """Return the text beneath the panel of each word."""
    notes = []
    for step, cell in enumerate(chosen):
        alpha = weights[step]
        most = f"at most {alpha.max():#.2g}" if cell is None else f"{alpha[cell]:#.2g} there"
        beta = "" if betas is None else f"\N{GREEK SMALL LETTER BETA} {betas[step]:.2f} · "
        lines = [beta + most] * details + ["nearly even"] * (cell is None and is_nearly_even(alpha))
        notes.append("\n".join(lines))
    return notes


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
        view, pixels = pixels[top:bottom, left:right], pixels // 2
        pixels[top:bottom, left:right] = view
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
    figure.text((min(1.2, width / 4) + 1.5 * _MARGIN) / width, 0.2 / height, text, size=8, color=_GRAY, va="center")


def _in_pixels(box: Box, size: tuple[int, int]) -> Box:
    """Return a box in fractions of a picture's (width, height) in pixels."""
    (left, top, right, bottom), (width, height) = box, size
    return left * width, top * height, right * width, bottom * height


def _outline(axes: Axes, box: Box) -> None:
    """Frame a box in white on black, which is visible on any picture."""
    from matplotlib.patches import Rectangle

    left, top, right, bottom = box
    for color, line in (("black", 2.0), ("white", 0.9)):
        style: dict[str, Any] = {"edgecolor": color, "linewidth": line, "clip_on": False}
        axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, **style))
