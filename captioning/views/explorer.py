"""The attention explorer: captions whose words move a map over the image, in one HTML file that needs nothing else.

It is explorer.html with explorer.css and four scripts: explorer_map.js (a map's pixels), explorer_stage.js (one
picture), explorer_panel.js (one run's caption) and explorer.js (images, runs and keys).
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
from captioning.views import maps
from captioning.views.page import render

_LONGEST_SIDE = 448  # pixels of an image in the page; encoders see no more than that
_LOSSLESS_SIDE = 128  # pixels; what is that small is shown so large that a JPEG's errors would be seen
_JPEG_QUALITY = 90


class Attended(Protocol):
    """A caption and the attention at its words, such as ``caption.Alternative``.

    Attributes:
        words: T words.
        trace: of (T,) steps; step ``t`` belongs to ``words[t]``. Its posterior and its heads, if there are any, can be
            shown in place of the alphas.
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
class RunCaptions:
    """One run's captions of an image with their attention. ``caption.Caption.for_explorer`` makes one.

    Attributes:
        run: its name, the same on every image.
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
    """An image with the captions of one or several runs.

    Attributes:
        view: exactly the pixels the model saw (``Preprocessing.view``).
        name: shown, and searched for.
        runs: at most one entry per run.
    """

    view: Image.Image
    name: str
    runs: Sequence[RunCaptions]


def explorer_page(images: Sequence[ExploredImage], title: str = "Attention explorer") -> str:
    """Return a complete HTML document that opens from disk and asks nothing of a network.

    About 40 KB per image of 224 x 224 pixels and one run with a beam of three.

    Raises:
        ValueError: the shapes of a run's captions contradict each other.
    """
    return render("views/explorer_page.html", title=title, content=_content(images))


def explorer_fragment(images: Sequence[ExploredImage]) -> str:
    """Return the explorer as a <section> to be placed in another page, style and script included.

    An element anywhere in that page with ``data-explore="NAME"`` shows the image of that name when it is clicked.

    Raises:
        ValueError: the shapes of a run's captions contradict each other.
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
            "dimChosen": maps.DIM_CHOSEN,
            "dimView": maps.DIM_VIEW,
        },
        "runs": list(runs),
        "attentions": _labels([caption for image in shown for run in image["runs"] for caption in run["captions"]]),
        "images": shown,
    }


def _labels(captions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What the page calls the attention that its captions have, by name, in the order of its buttons."""
    names = {name for caption in captions for name in caption["attention"]} - {"prior", "posterior"}
    heads = {name: name.capitalize() for name in sorted(names, key=lambda name: int(name.removeprefix("head ")))}
    if any("posterior" in caption["attention"] for caption in captions):
        return {"prior": "Before the word", "posterior": "After the word", **heads}
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
        "view": _data_uri(view),
        "references": list(references),
        "runs": [_run(run, f"{image.name}, {run.run}") for run in image.runs],
    }


def _run(run: RunCaptions, where: str) -> dict[str, Any]:
    rows, columns = run.cells.grid_size
    height, width = run.cells.size
    return {
        "run": run.run,
        "rows": rows,
        "columns": columns,
        "offset": [run.cells.offset[0] / height, run.cells.offset[1] / width],  # of the view's sides
        "stride": [run.cells.stride[0] / height, run.cells.stride[1] / width],
        "numbers": {name: value if isinstance(value, str) else _number(value) for name, value in run.numbers.items()},
        "captions": [_caption(caption, rows * columns, where) for caption in run.captions],
    }


def _caption(caption: Attended, cells: int, where: str) -> dict[str, Any]:
    steps, trace = len(caption.words), caption.trace
    attention = {"prior": _attention(trace.alphas, (steps, cells), f"{where}: alphas")}
    if trace.posterior is not None:
        attention["posterior"] = _attention(trace.posterior, (steps, cells), f"{where}: posterior")
    for number in range(0 if trace.heads is None else np.shape(trace.heads)[1]):
        name = f"head {number + 1}"
        attention[name] = _attention(np.asarray(trace.heads)[:, number], (steps, cells), f"{where}: {name}")
    betas = None if caption.trace.betas is None else np.asarray(caption.trace.betas, dtype=np.float32)
    if betas is not None and betas.shape != (steps,):
        raise ValueError(f"{where}: betas must be ({steps},), one per word, got {betas.shape}")
    if caption.log_probs is not None and len(caption.log_probs) < steps:
        raise ValueError(f"{where}: {len(caption.log_probs)} log_probs for {steps} words")
    if len(chosen := caption.trace.chosen()) != steps:
        raise ValueError(f"{where}: locations must be ({steps},), one per word, got {len(chosen)}")
    return {
        "words": list(caption.words),
        "score": None if caption.score is None else _number(caption.score),
        "logProbs": None if caption.log_probs is None else [_number(value) for value in caption.log_probs[:steps]],
        "betas": None if betas is None else [_number(value) for value in betas],
        "attention": attention,
        "chosen": chosen,
    }


def _attention(values: Any, shape: tuple[int, int], what: str) -> dict[str, Any]:
    """Attention (T, L) as a byte per location, of its word's peak: finer than the map's 256 colours show."""
    attention = np.asarray(values, dtype=np.float32)
    if attention.size == 0:
        attention = attention.reshape(shape)
    if attention.shape != shape:
        raise ValueError(f"{what} must be ({shape[0]}, {shape[1]}), got {attention.shape}")
    if not (np.isfinite(attention) & (attention >= 0)).all():
        raise ValueError(f"{what} must be finite and at least 0")
    peaks = attention.max(axis=1, initial=0)
    levels = np.rint(attention / np.where(peaks > 0, peaks, 1)[:, None] * 255).astype(np.uint8)
    return {"peaks": [_number(value) for value in peaks], "levels": _base64(levels.tobytes())}


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
