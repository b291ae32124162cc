"""The attention explorer: one HTML file with captions whose words move a map over the image.

It consists of explorer.html with explorer.css and four scripts: explorer_map.js (a map's pixels), explorer_stage.js
(one picture), explorer_panel.js (one run's caption) and explorer.js (images, runs and keys).
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioning.cells import CellGrid
from captioning.trace import AttentionTrace
from captioning.views import maps
from captioning.views.page import render

_LONGEST_SIDE = 448  # pixels of an image in the page; encoders see no more
_LOSSLESS_SIDE = 128  # pixels; smaller images are enlarged so much that a JPEG's errors would be visible
_JPEG_QUALITY = 90


class Attended(Protocol):
    """A caption and the attention at its words, such as ``caption.Alternative``.

    Attributes:
        words: T words.
        trace: Trace of (T,) steps; step t belongs to ``words[t]``. Its posterior or heads, if it has any, can be shown
            in place of the alphas.
        log_probs: Log-probabilities in nats, T of the words or T + 1 with <end>; or None.
        log_prob: What ranks captions, or None.
    """

    @property
    def words(self) -> Sequence[str]: ...
    @property
    def trace(self) -> AttentionTrace: ...
    @property
    def log_probs(self) -> Sequence[float] | None: ...
    @property
    def log_prob(self) -> float | None: ...


@dataclass(frozen=True)
class RunCaptions:
    """One run's captions of an image with their attention. ``caption.Caption.for_explorer`` makes one.

    Attributes:
        run: Name of the run, the same on every image.
        captions: Captions of the search, best first.
        cells: The L cells on the view.
        references: Captions that people wrote.
        numbers: Values beside the run's name, such as a sentence score; numbers are rounded to 3 digits.
        start: The word that is shown first, counted from 0; the last one of a shorter caption.
    """

    run: str
    captions: Sequence[Attended]
    cells: CellGrid
    references: Sequence[str] = ()
    numbers: Mapping[str, float | str] = field(default_factory=dict)
    start: int = 0


@dataclass(frozen=True)
class ExploredImage:
    """An image with the captions of one or several runs.

    Attributes:
        view: The pixels of the model's view (``Preprocessing.view``).
        name: Name of the image, which the search finds.
        runs: At most one entry per run.
    """

    view: Image.Image
    name: str
    runs: Sequence[RunCaptions]


def explorer_page(images: Sequence[ExploredImage], title: str = "Attention explorer") -> str:
    """Return a complete HTML document that opens from disk and needs no network.

    It has about 40 KB per image of 224 x 224 pixels and one run with a beam of three.

    Raises:
        ValueError: The shapes of a run's captions contradict each other.
    """
    return render("views/explorer_page.html", title=title, content=_content(images))


def explorer_fragment(images: Sequence[ExploredImage]) -> str:
    """Return the explorer as a <section> for another page, with style and script.

    A click on an element of that page with ``data-explore="NAME"`` shows the image of that name.

    Raises:
        ValueError: The shapes of a run's captions contradict each other.
    """
    return render("views/explorer.html", content=_content(images))


def _content(images: Sequence[ExploredImage]) -> dict[str, Any]:
    runs = dict.fromkeys(run.run for image in images for run in image.runs)
    colors = (maps.map_colors() * 255).round().astype(np.uint8)
    shown = [_image(image) for image in images]
    return {
        "map": {
            "colors": _base64(colors.tobytes()),
            "sigmaOfSide": maps.SIGMA_OF_SIDE,
            "sigmaOfCell": maps.SIGMA_OF_CELL,
            "dimBelow": maps.DIM_BELOW,
            "look": maps.LOOKS["color"]._asdict(),
        },
        "runs": list(runs),
        "attentions": _labels([caption for image in shown for run in image["runs"] for caption in run["captions"]]),
        "images": shown,
    }


def _labels(captions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the labels of the kinds of attention that the captions have, in the order of the buttons.

    The first one is shown at first. A posterior goes before its prior, because it says where the word came from.
    """
    names = {name for caption in captions for name in caption["attention"]} - {"prior", "posterior"}
    heads = {name: name.capitalize() for name in sorted(names, key=lambda name: int(name.removeprefix("head ")))}
    if any("posterior" in caption["attention"] for caption in captions):
        return {"posterior": "After the word", "prior": "Before the word", **heads}
    return {"prior": "All heads" if heads else "Attention", **heads}


def _image(image: ExploredImage) -> dict[str, Any]:
    names = [run.run for run in image.runs]
    if len(set(names)) < len(names):
        raise ValueError(f"{image.name}: one entry per run, got {names}")
    view = image.view.convert("RGB")
    view.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE), Image.Resampling.LANCZOS)
    references = dict.fromkeys(text for run in image.runs for text in run.references)  # runs share them
    return {
        "name": image.name,
        "width": view.width,
        "height": view.height,
        "view": data_uri(view),
        "references": list(references),
        "runs": [_run(run, f"{image.name}, {run.run}") for run in image.runs],
    }


def _run(run: RunCaptions, where: str) -> dict[str, Any]:
    height, width = run.cells.size
    return {
        "run": run.run,
        "rows": run.cells.grid_size[0],
        "columns": run.cells.grid_size[1],
        "offset": [run.cells.offset[0] / height, run.cells.offset[1] / width],  # of the view's sides
        "stride": [run.cells.stride[0] / height, run.cells.stride[1] / width],
        "numbers": {name: value if isinstance(value, str) else _number(value) for name, value in run.numbers.items()},
        "captions": [_caption(caption, run.cells, where) for caption in run.captions],
        "start": run.start,
    }


def _caption(caption: Attended, cells: CellGrid, where: str) -> dict[str, Any]:
    trace = maps.checked_trace(caption.words, caption.trace, cells, prefix=f"{where}: ")
    by_name = {"prior": trace.alphas}
    if trace.posterior is not None:
        by_name["posterior"] = trace.posterior
    if trace.heads is not None:
        by_name |= {f"head {n + 1}": trace.heads[:, n] for n in range(trace.heads.shape[1])}
    steps, log_probs = len(caption.words), caption.log_probs
    if log_probs is not None and len(log_probs) < steps:
        raise ValueError(f"{where}: {len(log_probs)} log_probs for {steps} words")
    return {
        "words": list(caption.words),
        "score": None if caption.log_prob is None else _number(caption.log_prob),
        "logProbs": None if log_probs is None else [_number(value) for value in log_probs[:steps]],
        "betas": None if trace.betas is None else [_number(value) for value in trace.betas],
        "attention": {name: _attention(array, f"{where}: {name}") for name, array in by_name.items()},
        "chosen": trace.chosen(),
    }


def _attention(attention: NDArray[np.float32], what: str) -> dict[str, Any]:
    """Return attention (T, L) as a byte per location, relative to the word's peak: finer than the map's 256 colours."""
    if not (np.isfinite(attention) & (attention >= 0)).all():
        raise ValueError(f"{what} must be finite and at least 0")
    peaks = attention.max(axis=1, initial=0)
    levels = np.rint(attention / np.where(peaks > 0, peaks, 1)[:, None] * 255).astype(np.uint8)
    return {"peaks": [_number(value) for value in peaks], "levels": _base64(levels.tobytes())}


def _number(value: float) -> float | None:
    """Return four digits, or None, which JSON has, if the value is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def data_uri(view: Image.Image) -> str:
    """Return a data URI: PNG if it is no larger (drawings) or the view is small, else JPEG (photographs)."""
    png, jpeg = io.BytesIO(), io.BytesIO()
    view.save(png, "PNG", optimize=True)
    view.save(jpeg, "JPEG", quality=_JPEG_QUALITY)
    lossless = png.tell() <= jpeg.tell() or max(view.size) <= _LOSSLESS_SIDE
    kind, content = ("png", png) if lossless else ("jpeg", jpeg)
    return f"data:image/{kind};base64,{_base64(content.getvalue())}"
