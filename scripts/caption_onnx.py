#!/usr/bin/env python
"""Caption images with onnxruntime, NumPy and Pillow alone: no PyTorch, and nothing of this repository but this file.

The folder is one that `captioning export --model CHECKPOINT --output DIR --onnx` wrote. Its captions are those of the
checkpoint, word for word.

examples:
  python scripts/caption_onnx.py exported/mine photo.jpg
  python scripts/caption_onnx.py exported/mine a.jpg b.jpg --beam_size 1
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

PAD, START, END, UNK = range(4)
SPECIALS = 4
FIRST_IDEOGRAPH = "\u2e80"
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")  # for EPS Pillow would start Ghostscript
CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")  # but tabs


class Hypothesis(NamedTuple):
    """A caption that the search ended with.

    Attributes:
        ids: T word ids.
        log_prob: Sum of the log-probabilities, divided by the length normalisation.
        finished: False if the maximum length cut the caption off.
        alphas: (T, L), the attention at each word, over the locations of the image row by row.
    """

    ids: list[int]
    log_prob: float
    finished: bool
    alphas: np.ndarray


class OnnxCaptioner:
    """The two graphs of an exported folder, with its words and its preprocessing."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.words = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))["words"]
        self.encoder, self.step = (
            onnxruntime.InferenceSession(folder / name, providers=onnxruntime.get_available_providers())
            for name in ("encoder.onnx", "step.onnx")
        )
        self.search = {"beam_size": 3, "length_normalization": 0.0, "max_length": 30, "min_length": 1}
        configured = self.config["settings"].get("model", {}).get("search") or {}
        self.search |= {name: value for name, value in configured.items() if name in self.search}
        self.spaced = not self.config["tokenizer"]["class_path"].endswith(".Characters")

    def __call__(self, path: str | Path, **options: Any) -> str:
        """Return the best caption of an image file. Options are those of ``beam_search``."""
        return self.text(self.caption(path, **options)[0])

    def caption(self, path: str | Path, **options: Any) -> list[Hypothesis]:
        """Return the captions of a beam search, best first; options that are not given are the model's own."""
        images = prepare(path, self.config["preprocessing"])[None]
        names = [output.name for output in self.encoder.get_outputs()]
        parts = dict(zip(names, self.encoder.run(None, {"images": images}), strict=True))
        return self.beam_search(parts, **self.search | options)

    def text(self, hypothesis: Hypothesis) -> str:
        """Return the words as people write them: characters without spaces, except between words of alphabets."""
        words = [self.words[i - SPECIALS] for i in hypothesis.ids]
        if self.spaced:
            return " ".join(words)
        text = ""
        for word in words:
            text += " " * bool(text and text[-1] < FIRST_IDEOGRAPH and word[0] < FIRST_IDEOGRAPH) + word
        return text

    def beam_search(
        self,
        parts: dict[str, np.ndarray],
        *,
        beam_size: int,
        length_normalization: float,
        max_length: int,
        min_length: int,
    ) -> list[Hypothesis]:
        """Return up to ``beam_size`` captions of one image, best first; a beam of 1 is greedy decoding.

        A finished caption leaves the beam, which becomes narrower. The search ends when all captions have finished, or
        at ``max_length``.
        """
        outputs = [output.name for output in self.step.get_outputs()]
        carried = [name for name in outputs if name.startswith("next.")]
        memory = {name: part for name, part in parts.items() if name.startswith("memory.")}
        state = {name: part for name, part in parts.items() if name.startswith("state.")}
        total, tokens = np.zeros(1, np.float32), np.array([START], np.int64)
        beams: list[tuple[list[int], list[np.ndarray]]] = [([], [])]
        ended: list[Hypothesis] = []
        for length in range(1, max_length + 1):
            repeated = {name: np.repeat(part, len(tokens), 0) for name, part in memory.items()}
            results = dict(zip(outputs, self.step.run(None, {"tokens": tokens, **repeated, **state}), strict=True))
            log_probs = results["log_probs"]
            log_probs[:, [PAD, START, UNK, *([END] if length <= min_length else [])]] = -np.inf
            candidates = (total[:, None] + log_probs).ravel()
            best = np.argsort(-candidates, kind="stable")[: beam_size - len(ended)]
            best = best[np.isfinite(candidates[best])]
            parents, chosen = np.divmod(best, log_probs.shape[1])
            normalised = candidates[best] / length**length_normalization
            going_on, followed = [], []
            for row, (parent, word, log_prob) in enumerate(
                zip(parents.tolist(), chosen.tolist(), normalised, strict=True)
            ):
                ids, alphas = beams[parent]
                if word == END:
                    ended.append(Hypothesis(ids, float(log_prob), True, np.array(alphas)))
                    continue
                followed.append(([*ids, word], [*alphas, results["alphas"][parent]]))
                going_on.append(row)
                if length == max_length:
                    ended.append(Hypothesis(followed[-1][0], float(log_prob), False, np.array(followed[-1][1])))
            if not going_on:
                break
            beams, total, tokens = followed, candidates[best[going_on]], chosen[going_on].astype(np.int64)
            state = {name.removeprefix("next."): results[name][parents[going_on]] for name in carried}
        return sorted(ended, key=lambda hypothesis: (not hypothesis.finished, -hypothesis.log_prob))


def prepare(path: str | Path, preprocessing: dict[str, Any]) -> np.ndarray:
    """Return an image file as the encoder's input, (3, height, width) float32."""
    resize, crop = preprocessing["resize"], preprocessing["crop"]
    with Image.open(path, formats=FORMATS) as image:
        if image.format == "JPEG":  # decoded at 1/2, 1/4 or 1/8 of its size if that is large enough
            scale = resize / min(image.size)
            image.draft(None, (math.ceil(image.width * scale), math.ceil(image.height * scale)))
        whole = ImageOps.exif_transpose(image)
        if "A" in whole.getbands() or "transparency" in whole.info:  # transparency is laid on white
            whole = Image.alpha_composite(Image.new("RGBA", whole.size, "white"), whole.convert("RGBA"))
        whole = whole.convert("RGB")
    filters = Image.Resampling[preprocessing["interpolation"].upper()]
    if crop is None:
        view = whole.resize((resize, resize), filters)
    else:
        long = int(resize * max(whole.size) / min(whole.size))
        view = whole.resize((resize, long) if whole.width <= whole.height else (long, resize), filters)
        left, top = (round((side - crop) / 2) for side in view.size)
        view = view.crop((left, top, left + crop, top + crop))
    pixels = np.asarray(view, np.float32).transpose(2, 0, 1)
    mean, std = (np.array(preprocessing[name], np.float32).reshape(3, 1, 1) * 255 for name in ("mean", "std"))
    return (pixels - mean) / std


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", help="a folder that `captioning export --onnx` wrote")
    parser.add_argument("images", metavar="IMAGE", nargs="+")
    for name, kind in (("beam_size", int), ("length_normalization", float), ("max_length", int), ("min_length", int)):
        parser.add_argument(f"--{name}", type=kind, help="(default: as the model was evaluated)")
    arguments = vars(parser.parse_args())
    folder, images = arguments.pop("folder"), arguments.pop("images")
    options = {name: value for name, value in arguments.items() if value is not None}
    try:
        captioner = OnnxCaptioner(folder)
    except Exception as error:  # onnxruntime raises many types
        print(f"error: {folder}: is no folder that `captioning export --onnx` wrote ({error})", file=sys.stderr)
        sys.exit(2)
    failed = 0
    for path in images:
        try:
            text = captioner(path, **options)
        except (OSError, ValueError, SyntaxError) as error:  # of Pillow
            failed += 1
            print(f"error: {path}: {error}", file=sys.stderr)
            continue
        # Control characters would command the terminal; the words are a file's.
        text = CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
        print(f"{path}\t{text}" if len(images) > 1 else text, flush=True)
    sys.exit(2 if failed else 0)


if __name__ == "__main__":
    main()
