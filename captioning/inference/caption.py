"""A caption with its attention, the pixels that the model saw, and the other captions of the search."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioning.cells import CellGrid
from captioning.errors import printable
from captioning.files import FIGURE_SUFFIXES, check_output, replacing
from captioning.trace import AttentionTrace
from captioning.views.maps import Style
from captioning.views.overlays import WHOLE, Box, ModelAttention, attention_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Float32 = NDArray[np.float32]


class Photo(NamedTuple):
    """A whole upright image, at full or reduced size, and the box of it that the model sees."""

    image: Image.Image
    view_box: Box  # (left, top, right, bottom) as fractions of width and height


@dataclass(frozen=True, eq=False)
class Caption:
    """A caption with the attention at each word and the image.

    Attributes:
        text: The words as people write them: in English with spaces in between.
        words: T words, without <start> and <end>.
        log_probs: Log-probability of each word in nats, and one more for <end> if the caption is finished.
        log_prob: The search's criterion: the sum of ``log_probs``, divided by the length normalization.
        finished: False if the maximum length cut the caption off.
        trace: The attention at each word, as arrays (T, ..).
        cells: The positions of the L locations on the view.
        view: The pixels that the model saw, after resizing and cropping.
        path: Path of the image file; None for an image given as pixels.
        read_photo: Reads the whole image again; returns None if the file has changed. None if there is only the view.
        alternatives: The other captions of the image: the rest of the beam, best first, or further samples.
        model: Name of the model; "" without ``other_models``.
        other_models: The same words of the same image with the attention of other models, by name; see ``same_words``.
    """

    text: str
    words: list[str]
    log_probs: list[float]
    log_prob: float
    finished: bool
    trace: AttentionTrace
    cells: CellGrid
    view: Image.Image
    path: str | None = None
    read_photo: Callable[[], Photo | None] | None = None
    alternatives: list[Caption] = dataclasses.field(default_factory=list)
    model: str = ""
    other_models: Mapping[str, Caption] = dataclasses.field(default_factory=dict)

    @property
    def alphas(self) -> Float32:
        """(T, L), the probabilities of the locations at each word."""
        return self.trace.alphas

    @property
    def betas(self) -> Float32 | None:
        """(T,), beta at each word in [0, 1]; None if the decoder has no such gate."""
        return self.trace.betas

    @property
    def evidence(self) -> Float32 | None:
        """(T, L), where each word came from, as fractions that sum to 1; None for a decoder without evidence."""
        return self.trace.evidence

    @property
    def grid_size(self) -> tuple[int, int]:
        """(height, width) of the grid; its height x width = L locations are numbered row by row."""
        return self.cells.grid_size

    def photo(self) -> Photo:
        """Return the whole image with the box that the model saw; without the image, the view."""
        return (self.read_photo and self.read_photo()) or Photo(self.view, WHOLE)

    def seen_photo(self) -> Image.Image:
        """Return the image within the box that the model saw, undistorted; without the image, the view."""
        photo, box = self.photo()
        left, top, right, bottom = map(round, np.multiply(box, photo.size * 2).tolist())
        return photo.crop((left, top, right, bottom))

    def figure(self, style: Style = "color", *, details: bool = False) -> Figure:
        """Return the paper's figure: the image, then the attention at each word.

        If the image file has changed since it was captioned, the figure shows the model's view.

        Args:
            style: "color": the map's colors on the image. "paper": white on the gray image, as in Fig. 2.
            details: Also write beta and the greatest attention of each word, and show the evidence below the alphas.
        """
        captions = {self.model: self, **self.other_models}
        photos = {name: caption.photo() for name, caption in captions.items()}
        attention = {n: ModelAttention(c.trace, c.cells, photos[n].view_box) for n, c in captions.items()}
        photo = photos[self.model].image
        return attention_figure(photo, self.words, attention, style=style, text=self.text, details=details)

    def save_figure(self, path: str | Path, style: Style = "color", *, details: bool = False) -> None:
        """Write ``figure`` to a .png, .pdf or .svg file. Raises InputError for another suffix."""
        from matplotlib import rc_context

        check_output(path, suffixes=FIGURE_SUFFIXES)
        with rc_context({"pdf.fonttype": 42}), replacing(Path(path)) as temporary:  # TrueType, not Type 3
            self.figure(style, details=details).savefig(temporary, format=Path(path).suffix[1:].lower())

    def explorer_image(self, model: str) -> dict[str, Any]:
        """Return the image with this caption and its alternatives, as those of ``model``, for the explorer."""
        from captioning.views.explorer import explorer_image, explorer_run

        return explorer_image(printable(Path(self.path or "").name), self.seen_photo(), [explorer_run(model, self)])

    def to_dict(self) -> dict[str, Any]:
        """Return the caption as plain data for JSON, with attention rounded to 6 digits, without pixels and heads.

        "cells" has the center of the first location and the distance between neighbors, [y, x] in pixels of the view.
        "evidence" is null for a decoder without it. "chosen" has the location that hard attention chose at each word,
        null where the context is an expectation.
        """
        return {
            "image": self.path,
            "caption": self.text,
            "words": self.words,
            "log_probs": self.log_probs,
            "log_prob": self.log_prob,
            "finished": self.finished,
            "grid_size": list(self.grid_size),
            "cells": {"offset": list(self.cells.offset), "stride": list(self.cells.stride)},
            "view_size": [self.view.height, self.view.width],
            "alphas": [_rounded(alpha) for alpha in self.alphas],
            "betas": None if self.betas is None else _rounded(self.betas),
            "evidence": None if self.evidence is None else [_rounded(weights) for weights in self.evidence],
            "chosen": self.trace.chosen(),
            "alternatives": [{"caption": caption.text, "log_prob": caption.log_prob} for caption in self.alternatives],
        }

    def __repr__(self) -> str:
        return f"Caption({self.text!r})"

    def jpeg(self) -> bytes:
        """Return the content of a JPEG file of the figure, which a notebook shows."""
        buffer = io.BytesIO()
        self.figure().savefig(buffer, format="jpeg", dpi=80, pil_kwargs={"quality": 85})
        return buffer.getvalue()

    _repr_jpeg_ = jpeg


def _rounded(values: Float32) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]
