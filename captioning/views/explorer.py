"""The attention explorer: one HTML file with captions whose words move a map over the image.

``explorer_run`` and ``explorer_image`` make the plain data of a page of captions, ``explorer_page`` the page. The page
consists of explorer.html with explorer.css and four scripts: explorer_map.js (a map's pixels), explorer_stage.js (one
picture), explorer_panel.js (one run's caption) and explorer.js (images, runs and keys).
"""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioning.cells import CellGrid
from captioning.trace import map_fields
from captioning.views import maps
from captioning.views.templates import render

_LONGEST_SIDE = 1024  # pixels of an image in the page, sharp on a wide screen
_LOSSLESS_SIDE = 128  # pixels; smaller images are PNG, because the page enlarges them and JPEG artifacts would show
_JPEG_QUALITY = 85

ExplorerData = dict[str, Any]
"""Plain data that the page's script reads."""


def explorer_page(images: Sequence[ExplorerData], title: str = "Attention explorer") -> str:
    """Return a complete HTML document of ``explorer_image`` entries that needs no network, 130 KB per photo."""
    return render("views/explorer_page.html", title=title, content=_page_data(images))


def explorer_fragment(images: Sequence[ExplorerData]) -> str:
    """Return the explorer as a <section> for another page, with style and script.

    A click on an element of the other page with ``data-explore="NAME"`` shows the image NAME.
    """
    return render("views/explorer.html", content=_page_data(images))


def explorer_image(
    name: str, view: Image.Image, runs: Sequence[ExplorerData], *, references: Sequence[str] = ()
) -> ExplorerData:
    """Return an image with the ``explorer_run`` entries of runs with different names.

    ``view`` is what the models saw of the image, such as ``Caption.seen_photo``; the page's search finds ``name``.
    """
    view = view.convert("RGB")
    view.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE), Image.Resampling.LANCZOS)
    kind, file = "png" if max(view.size) <= _LOSSLESS_SIDE else "jpeg", io.BytesIO()
    view.save(file, kind, quality=_JPEG_QUALITY)
    data = {"width": view.width, "height": view.height, "view": f"data:image/{kind};base64,{_base64(file.getvalue())}"}
    return {"name": name, **data, "references": list(references), "runs": list(runs)}


def explorer_run(
    run: str, caption: Any, *, numbers: Mapping[str, float | str] | None = None, first_word: int = 1
) -> ExplorerData:
    """Return one run's caption of an image and its alternatives, with their attention.

    Args:
        run: Name of the run, the same on every image.
        caption: An ``inference.Caption``.
        numbers: Values beside the run's name, such as a metric of the caption, rounded to 4 digits.
        first_word: Index of the word that is shown first; a shorter caption starts at its last word. The default, the
            second word, is most often a noun.
    """
    cells: CellGrid = caption.cells
    height, width = cells.size
    return {
        "run": run,
        "rows": cells.grid_size[0],
        "columns": cells.grid_size[1],
        "offset": [cells.offset[0] / height, cells.offset[1] / width],  # in fractions of the view's sides
        "stride": [cells.stride[0] / height, cells.stride[1] / width],
        "numbers": {name: x if isinstance(x, str) else _rounded_number(x) for name, x in (numbers or {}).items()},
        "captions": [_caption_data(each) for each in (caption, *caption.alternatives)],
        "start": first_word,
    }


def _caption_data(caption: Any) -> ExplorerData:
    trace = map_fields(caption.trace, np.asarray)
    attention = {"alphas": trace.alphas}
    if trace.evidence is not None:
        attention["evidence"] = trace.evidence
    if trace.head_alphas is not None:
        attention |= {f"head {n + 1}": trace.head_alphas[:, n] for n in range(trace.head_alphas.shape[1])}
    return {
        "words": list(caption.words),
        "logProb": _rounded_number(caption.log_prob),
        "logProbs": [_rounded_number(value) for value in caption.log_probs[: len(caption.words)]],
        "betas": None if trace.betas is None else [_rounded_number(value) for value in trace.betas],
        "attention": {name: _attention_data(array) for name, array in attention.items()},
        "chosen": trace.chosen(),
    }


def _attention_data(attention: NDArray[np.float32]) -> ExplorerData:
    """Return attention (T, L) as one byte per location, in 255ths of the word's peak."""
    peaks = attention.max(axis=1, initial=0)
    levels = np.rint(attention / np.where(peaks > 0, peaks, 1)[:, None] * 255).astype(np.uint8)
    return {"peaks": [_rounded_number(value) for value in peaks], "levels": _base64(levels.tobytes())}


def _page_data(images: Sequence[ExplorerData]) -> ExplorerData:
    runs = [run for image in images for run in image["runs"]]
    return {
        "map": {
            "colors": _base64((maps.map_colors() * 255).round().astype(np.uint8).tobytes()),
            "sigmaOfSide": maps.SIGMA_OF_SIDE,
            "sigmaOfCell": maps.SIGMA_OF_CELL,
            "nearlyEven": maps.NEARLY_EVEN,
            "style": maps.STYLES["color"],
        },
        "runs": list(dict.fromkeys(run["run"] for run in runs)),
        "attentions": _labels({name for run in runs for caption in run["captions"] for name in caption["attention"]}),
        "images": list(images),
    }


def _labels(names: set[str]) -> dict[str, str]:
    """Return the labels of the kinds of attention in the order of the buttons; the page starts with the first."""
    numbers = sorted(int(name.removeprefix("head ")) for name in names - {"alphas", "evidence"})
    heads = {f"head {number}": f"Head {number}" for number in numbers}
    evidence = {"evidence": "Where the word came from"} if "evidence" in names else {}
    return {"alphas": "All heads" if heads else "Where it looked", **evidence, **heads}


def _rounded_number(value: float) -> float | None:
    """Return the value in four digits, or None (null in JSON) if it is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
