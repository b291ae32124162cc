"""The paper's figure: the image, followed by the attention at each word (Xu et al. 2015, Fig. 2 and 3)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioning.cells import CellGrid
from captioning.trace import AttentionTrace
from captioning.views.maps import Style, checked_trace, paint, scale_end, smooth_alphas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 7
_PANEL = 1.75  # inches, a panel's longer side
_GAP = 0.09
_TITLE = 0.27  # inches above a word's panels
_NUMBERS = 0.22  # inches below a panel
_SIDE = 0.22  # inches beside a word's panels, for their names
_MARGIN = 0.12
_CAPTION = 0.34  # inches
_SCALE = 0.34
_PANEL_PIXELS = 224, 448  # least of a panel's shorter side, so that maps stay smooth; most of its longer side
_PHOTO_PIXELS = 1024  # most of the image's longer side; no figure shows more

Box = tuple[float, float, float, float]
"""(left, top, right, bottom)"""

WHOLE: Box = (0.0, 0.0, 1.0, 1.0)


def attention_figure(
    view: Image.Image,
    words: Sequence[str],
    trace: AttentionTrace,
    cells: CellGrid,
    *,
    photo: Image.Image | None = None,
    region: Box = WHOLE,
    style: Style = "color",
    text: str | None = None,
    heads: bool = False,
    details: bool = False,
) -> Figure:
    """Return the image and its caption, followed by a panel per word with the attention over the model's view.

    All maps have one scale, whose ends are written at the bottom as smoothed alphas. If hard attention chose a cell,
    the cell is outlined. If the trace has a posterior, it is shown in place of the alphas: it says where the word came
    from. With ``heads`` there is a panel for each head. Save with ``figure.savefig("x.png")``, or pdf; the figure is
    not registered with pyplot.

    Args:
        view: The pixels of the model's view (``Preprocessing.view``).
        words: T words.
        trace: Trace of the (T,) steps of these words.
        cells: The L cells on the view.
        photo: The whole image, shown and painted on in place of the view, with the view outlined.
        region: The view's box in ``photo``, in fractions of its width and height (``Preprocessing.region``).
        style: "color": the map's colours on the image. "paper": light alone, as in the paper's Fig. 3.
        text: The caption as written; by default the words with spaces between them.
        heads: Show the attention of each head beneath their mean.
        details: Write beta and the map's maximum beneath each panel, and show the alphas above a posterior.

    Raises:
        ValueError: The shapes contradict each other, or there are no heads to show.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    trace = checked_trace(words, trace, cells)
    maps = _named_maps(trace, heads=heads, details=details)
    whole = view if photo is None else photo
    background = _background(whole, region)
    aspect = background.shape[1] / background.shape[0]
    layout = _Layout(len(words), aspect, maps=len(maps), below=_NUMBERS if details else _GAP)
    figure = Figure(figsize=(layout.width, layout.height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    # One axes in inches, y downwards, for all panels: an axes for each would take longer than drawing it.
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set(xlim=(0, layout.width), ylim=(layout.height, 0), autoscale_on=False)
    _text(
        axes,
        layout.width / 2,
        _CAPTION / 2,
        " ".join(words) if text is None else text,
        size=12,
        fit=layout.width - 2 * _MARGIN,
        weight="bold",
    )
    _draw_photo(axes, layout, whole, region)
    end = _draw_words(axes, layout, words, trace, maps, cells, background, style, details=details)
    _draw_scale(axes, layout, end, style)
    return figure


def _named_maps(trace: AttentionTrace, *, heads: bool, details: bool) -> dict[str, NDArray[np.float32]]:
    """Return the maps of every word by name, each (T, L).

    Raises:
        ValueError: There are no heads to show.
    """
    if heads:
        if trace.heads is None:
            raise ValueError("the trace has no heads")
        count = trace.heads.shape[1]
        return {f"mean of {count} heads": trace.alphas} | {
            f"head {number + 1}": trace.heads[:, number] for number in range(count)
        }
    if trace.posterior is None:
        return {"attention": trace.alphas}
    posterior = {"after the word (posterior)": trace.posterior}
    return {"before the word (prior)": trace.alphas} | posterior if details else posterior


def _draw_words(
    axes: Axes,
    layout: _Layout,
    words: Sequence[str],
    trace: AttentionTrace,
    maps: dict[str, NDArray[np.float32]],
    cells: CellGrid,
    background: NDArray[np.float32],
    style: Style,
    *,
    details: bool,
) -> float:
    """Draw each word above its maps; returns the end of their scale."""
    scaled = cells.scaled((background.shape[0], background.shape[1]))
    chosen = trace.chosen()
    # Smoothed twice, because holding every map of a caption with heads takes hundreds of megabytes.
    maxima = {name: [float(smooth_alphas(alpha, scaled).max()) for alpha in alphas] for name, alphas in maps.items()}
    end = scale_end(itertools.chain(*maxima.values()), trace.alphas.shape[1])
    for step, word in enumerate(words):
        left, top = layout.word(step)
        _text(axes, left + layout.panel_width / 2, top - 0.12, word, size=11, fit=layout.panel_width)
        for number, (name, alphas) in enumerate(maps.items()):
            place = left, layout.panel_top(top, number), layout.panel_width, layout.panel_height
            _picture(axes, paint(background, smooth_alphas(alphas[step], scaled), end, style), place)
            if (location := chosen[step]) is not None:
                _outline(axes, place, _in_panel(cells, location))
            if details:
                numbers = f"at most {_short(maxima[name][step])}"
                if trace.betas is not None and number == 0:
                    numbers = f"\N{GREEK SMALL LETTER BETA} {trace.betas[step]:.2f} · {numbers}"
                below = place[1] + place[3] + _NUMBERS / 2
                _text(axes, left + place[2] / 2, below, numbers, size=8, fit=place[2], color="0.35")
            if len(maps) > 1 and layout.is_first(step):
                _text(axes, left - _SIDE / 2, place[1] + place[3] / 2, name, size=8, color="0.35", rotation=90)
    return end


class _Layout:
    """Places in inches: the caption, the image beside the first words, words in rows, the value scale at the bottom.

    Args:
        words: Number of words.
        aspect: Width / height of a panel.
        maps: Panels of a word, one beneath the other.
        below: Inches below a panel.
    """

    def __init__(self, words: int, aspect: float, *, maps: int, below: float) -> None:
        self.below = below
        self.panel_width, self.panel_height = _PANEL * min(1.0, aspect), _PANEL / max(1.0, aspect)
        self.step_x = self.panel_width + _GAP
        self.side = _SIDE if maps > 1 else 0.0
        self.step_y = _TITLE + maps * (self.panel_height + below)
        # The image takes two columns and two panels, or one panel if all words fit beside it.
        one_row = maps == 1 and words < _COLUMNS
        self.photo_columns = 1 if one_row else 2
        self.photo_rows = 1 if one_row or maps > 1 else 2
        places = words + self.photo_columns * self.photo_rows
        rows = max(self.photo_rows, math.ceil(places / _COLUMNS))
        columns = max(self.photo_columns, math.ceil(places / rows))
        self._places = [
            (row, column)
            for row in range(rows)
            for column in range(columns)
            if row >= self.photo_rows or column >= self.photo_columns
        ]
        self.width = 2 * _MARGIN + self.side + columns * self.step_x - _GAP
        self.height = _CAPTION + rows * self.step_y + _SCALE
        photo_height = self.photo_rows * self.step_y - _TITLE - below
        self.photo = _MARGIN, _CAPTION + _TITLE, self.photo_columns * self.step_x - _GAP, photo_height

    def word(self, step: int) -> tuple[float, float]:
        """Return left and top of a word's first panel."""
        row, column = self._places[step]
        return _MARGIN + self.side + column * self.step_x, _CAPTION + row * self.step_y + _TITLE

    def panel_top(self, top: float, number: int) -> float:
        return top + number * (self.panel_height + self.below)

    def is_first(self, step: int) -> bool:
        """Return whether a word is the first of its row."""
        return step == 0 or self._places[step][0] > self._places[step - 1][0]


def _background(photo: Image.Image, region: Box) -> NDArray[np.float32]:
    """Return the model's view of the image, (height, width, 3) in 0..1, large enough for smooth maps."""
    left, top, right, bottom = (
        fraction * side for fraction, side in zip(region, 2 * [photo.width, photo.height], strict=True)
    )
    width, height = right - left, bottom - top
    least, most = _PANEL_PIXELS
    scale = min(max(1.0, least / min(width, height)), most / max(width, height))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    view = photo.convert("RGB").resize(size, Image.Resampling.BICUBIC, box=(left, top, right, bottom))
    return np.asarray(view, dtype=np.float32) / np.float32(255)


def _draw_photo(axes: Axes, layout: _Layout, photo: Image.Image, region: Box) -> None:
    """Draw the whole image, dimmed outside the model's view."""
    shown = photo.convert("RGB")
    shown.thumbnail((_PHOTO_PIXELS, _PHOTO_PIXELS), Image.Resampling.LANCZOS)
    x, y, width, height = layout.photo
    scale = min(width / shown.width, height / shown.height)
    place = x + (width - shown.width * scale) / 2, y, shown.width * scale, shown.height * scale
    if region == WHOLE:
        _picture(axes, np.asarray(shown), place)
        return
    left, top, right, bottom = (
        round(fraction * side) for fraction, side in zip(region, 2 * [shown.width, shown.height], strict=True)
    )
    pixels = np.asarray(shown) // 2
    pixels[top:bottom, left:right] = np.asarray(shown)[top:bottom, left:right]
    _picture(axes, pixels, place)
    _outline(axes, place, region)


def _draw_scale(axes: Axes, layout: _Layout, end: float, style: Style) -> None:
    x, y, width, height = _MARGIN, layout.height - _SCALE / 2 - 0.05, min(1.2, layout.width / 4), 0.1
    white, ramp = np.ones((1, 256, 3), dtype=np.float32), np.linspace(0, 1, 256, dtype=np.float32)[None]
    _picture(axes, paint(white, ramp, 1.0, style), (x, y, width, height))
    text = f"attention per location, from 0 to {_short(end)} and above"
    fit = layout.width - width - 3 * _MARGIN
    _text(axes, x + width + _MARGIN, y + height / 2, text, size=8, fit=fit, color="0.35", ha="left")


def _picture(axes: Axes, pixels: NDArray[Any], place: Box) -> None:
    """Draw pixels at a place: left, top, width and height in inches."""
    x, y, width, height = place
    axes.imshow(pixels, extent=(x, x + width, y + height, y), aspect="auto")


def _in_panel(cells: CellGrid, location: int) -> Box:
    """Return a cell's box in fractions of the view's width and height."""
    top, bottom, left, right = cells.square(location)
    height, width = cells.size
    return left / width, top / height, right / width, bottom / height


def _outline(axes: Axes, place: Box, box: Box) -> None:
    """Frame a box of a picture from outside, in white on black, which is visible on any picture.

    Args:
        place: The picture's left, top, width and height in inches.
        box: The box in fractions of the picture's width and height.
    """
    from matplotlib.patches import Rectangle

    x, y, width, height = place
    left, top, right, bottom = box
    white, black = 0.9, 2.0  # points
    out = white / 2 / 72
    corner = x + left * width - out, y + top * height - out
    across, down = (right - left) * width + 2 * out, (bottom - top) * height + 2 * out
    for color, line in (("black", black), ("white", white)):
        axes.add_patch(Rectangle(corner, across, down, fill=False, edgecolor=color, linewidth=line))


def _text(axes: Axes, x: float, y: float, text: str, *, size: float, fit: float | None = None, **style: Any) -> None:
    """Write text, centred by default, and smaller if it would be wider than ``fit`` inches."""
    if fit is not None:
        inches_per_letter = 0.62 * size / 72  # a little more than the font's mean
        size = max(5.0, size * min(1.0, fit / (inches_per_letter * max(1, len(text)))))
    # parse_math=False: a caption may say "$ 5".
    axes.text(x, y, text, size=size, va="center", parse_math=False, **{"ha": "center"} | style)


def _short(value: float) -> str:
    """Return two digits, and four decimals at most."""
    if value < 5e-5:
        return "0"
    return f"{value:.{min(4, max(2, 1 - math.floor(math.log10(value))))}f}"
