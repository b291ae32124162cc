"""The attention explorer: captions whose words move a map over the image, in one HTML file that needs nothing else.

It is explorer.html with explorer.css and three scripts: explorer_map.js (a map's pixels), explorer_panel.js (one run's
caption) and explorer.js (images, runs and keys).
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from PIL import Image

from captioning.cells import CellGrid
from captioning.trace import AttentionTrace
from captioning.views import overlays
from captioning.views.page import render

_LONGEST_SIDE = 448  # pixels of an image in the page; encoders see no more than that
_LOSSLESS_SIDE = 128  # pixels; what is that small is shown so large that a JPEG's errors would be seen
_JPEG_QUALITY = 90


class Attended(Protocol):
    """A caption and where its words looked, such as ``caption.Alternative``.

    Attributes:
        words: T words.
        trace: of (T,) steps; step ``t`` belongs to ``words[t]``.
        log_probs: nats, T of the words or T + 1 with <end>; None if they are not known.
        score: what captions are ranked by.
    """

    @property
    def words(self) -> Sequence[str]: ...
    @property
    def trace(self) -> AttentionTrace: ...
    @property
    def log_probs(self) -> Sequence[float] | None: ...
    @property
    def score(self) -> float | None: ...


@dataclass(frozen=True)
class Look:
    """One run's captions of an image with their attention. ``caption.Caption.for_explorer`` makes one.

    Attributes:
        run: a name; looks of the same run on several images share it.
        captions: of the search, best first.
        cells: where the L locations lie on the view.
        references: what people wrote.
        numbers: shown beside the run's name, such as a sentence score; numbers are rounded to 3 digits.
    """

    run: str
    captions: Sequence[Attended]
    cells: CellGrid
    references: Sequence[str] = ()
    numbers: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class ExploredImage:
    """An image with the looks of one or several runs.

    Attributes:
        view: exactly the pixels the model saw (``Preprocessing.view``).
        name: shown, and searched for.
        looks: at most one per run.
    """

    view: Image.Image
    name: str
    looks: Sequence[Look]


def explorer_page(images: Sequence[ExploredImage], title: str = "Attention explorer") -> str:
    """Return a complete HTML document that opens from disk and asks nothing of a network.

    About 40 KB per image of 224 x 224 pixels and one run with a beam of three.

    Raises:
        ValueError: the shapes of a look contradict each other.
    """
    return render("views/explorer_page.html", title=title, content=_content(images))


def explorer_fragment(images: Sequence[ExploredImage]) -> str:
    """Return the explorer as a <section> to be placed in another page, style and script included.

    An element anywhere in that page with ``data-explore="NAME"`` shows the image of that name when it is clicked.

    Raises:
        ValueError: the shapes of a look contradict each other.
    """
    return render("views/explorer.html", content=_content(images))


def _content(images: Sequence[ExploredImage]) -> dict[str, Any]:
    runs = dict.fromkeys(look.run for image in images for look in image.looks)
    colors = (overlays.map_colors() * 255).round().astype(np.uint8)
    return {
        "map": {
            "colors": _base64(colors.tobytes()),
            "sigmaOfSide": overlays.SIGMA_OF_SIDE,
            "sigmaOfCell": overlays.SIGMA_OF_CELL,
            "dimBelow": overlays.DIM_BELOW,
            "dimChosen": overlays.DIM_CHOSEN,
        },
        "runs": list(runs),
        "images": [_image(image) for image in images],
    }


def _image(image: ExploredImage) -> dict[str, Any]:
    runs = [look.run for look in image.looks]
    if len(set(runs)) < len(runs):
        raise ValueError(f"{image.name}: one look per run, got {runs}")
    view = image.view.convert("RGB")
    view.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE), Image.Resampling.LANCZOS)
    references = dict.fromkeys(text for look in image.looks for text in look.references)  # runs share them
    return {
        "name": image.name,
        "width": view.width,
        "height": view.height,
        "view": _data_uri(view),
        "references": list(references),
        "looks": [_look(look, f"{image.name}, {look.run}") for look in image.looks],
    }


def _look(look: Look, where: str) -> dict[str, Any]:
    rows, columns = look.cells.grid_size
    height, width = look.cells.size
    return {
        "run": look.run,
        "rows": rows,
        "columns": columns,
        "offset": [look.cells.offset[0] / height, look.cells.offset[1] / width],  # of the view's sides
        "stride": [look.cells.stride[0] / height, look.cells.stride[1] / width],
        "numbers": {name: value if isinstance(value, str) else _number(value) for name, value in look.numbers.items()},
        "captions": [_caption(caption, rows * columns, where) for caption in look.captions],
    }


def _caption(caption: Attended, cells: int, where: str) -> dict[str, Any]:
    alphas = np.asarray(caption.trace.alphas, dtype=np.float32)
    steps = len(caption.words)
    if alphas.size == 0:
        alphas = alphas.reshape(steps, cells)
    if alphas.shape != (steps, cells):
        raise ValueError(f"{where}: alphas must be ({steps}, {cells}), got {alphas.shape}")
    if not (np.isfinite(alphas) & (alphas >= 0)).all():
        raise ValueError(f"{where}: alphas must be finite and at least 0")
    betas = None if caption.trace.betas is None else np.asarray(caption.trace.betas, dtype=np.float32)
    if betas is not None and betas.shape != (steps,):
        raise ValueError(f"{where}: betas must be ({steps},), one per word, got {betas.shape}")
    if caption.log_probs is not None and len(caption.log_probs) < steps:
        raise ValueError(f"{where}: {len(caption.log_probs)} log_probs for {steps} words")
    if len(chosen := caption.trace.chosen()) != steps:
        raise ValueError(f"{where}: locations must be ({steps},), one per word, got {len(chosen)}")
    peaks = alphas.max(axis=1, initial=0)
    # A byte per alpha, of its row's maximum: finer than the map's 256 colours show.
    levels = np.rint(alphas / np.where(peaks > 0, peaks, 1)[:, None] * 255).astype(np.uint8)
    return {
        "words": list(caption.words),
        "score": None if caption.score is None else _number(caption.score),
        "logProbs": None if caption.log_probs is None else [_number(value) for value in caption.log_probs[:steps]],
        "betas": None if betas is None else [_number(value) for value in betas],
        "peaks": [_number(value) for value in peaks],
        "levels": _base64(levels.tobytes()),
        "chosen": chosen,
    }


def _number(value: float) -> float | None:
    """Four digits; None, which JSON knows, where there is no such number."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _data_uri(view: Image.Image) -> str:
    """PNG where it is no larger (drawings) or the view is small, JPEG for photographs."""
    png, jpeg = io.BytesIO(), io.BytesIO()
    view.save(png, "PNG", optimize=True)
    view.save(jpeg, "JPEG", quality=_JPEG_QUALITY)
    lossless = png.tell() <= jpeg.tell() or max(view.size) <= _LOSSLESS_SIDE
    kind, content = ("png", png) if lossless else ("jpeg", jpeg)
    return f"data:image/{kind};base64,{_base64(content.getvalue())}"
