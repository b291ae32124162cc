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
IDEOGRAPH = "[\u2e80-\U0010ffff]"
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")  # for EPS Pillow would start Ghostscript
SEARCH = {"beam_size": 3, "length_normalization": 0.0, "max_length": 30, "min_length": 1, "no_repeat_ngram": 0}


class Hypothesis(NamedTuple):
    """A caption: T word ids, the sum of their log-probabilities after length normalisation, and alphas (T, L)."""

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
        configured = self.config["settings"].get("model", {}).get("search") or {}
        self.search = SEARCH | {name: value for name, value in configured.items() if name in SEARCH and value}

    def caption(self, path: str | Path, **options: Any) -> list[Hypothesis]:
        """Return the captions of an image file, best first. Options not given are the model's own."""
        images = prepare(path, self.config["preprocessing"])[None]
        names = [output.name for output in self.encoder.get_outputs()]
        parts = dict(zip(names, self.encoder.run(None, {"images": images}), strict=True))
        return self.beam_search(parts, **self.search | options)

    def text(self, hypothesis: Hypothesis) -> str:
        """Return the words as people write them: characters without spaces, except between words of alphabets."""
        text = " ".join(self.words[i - 4] for i in hypothesis.ids)
        of_characters = self.config["tokenizer"]["class_path"].endswith(".Characters")
        return re.sub(f"(?<={IDEOGRAPH}) | (?={IDEOGRAPH})", "", text) if of_characters else text

    def beam_search(
        self,
        parts: dict[str, Any],
        beam_size: int,
        length_normalization: float,
        max_length: int,
        min_length: int,
        no_repeat_ngram: int,
    ) -> list[Hypothesis]:
        """Return up to ``beam_size`` captions of one image, best first; a beam of 1 is greedy decoding.

        No sequence of ``no_repeat_ngram`` words stands twice in a caption, and no word twice in a row; 0 allows that.

        A finished caption leaves the beam, which becomes narrower. The search ends when all captions have finished, or
        at ``max_length``.
        """
        outputs = [output.name for output in self.step.get_outputs()]
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
            for row, (ids, _) in enumerate(beams if no_repeat_ngram else ()):
                log_probs[row, _repeating(ids, no_repeat_ngram)] = -np.inf
            candidates = (total[:, None] + log_probs).ravel()
            best = np.argsort(-candidates, kind="stable")[: beam_size - len(ended)]
            best = best[np.isfinite(candidates[best])]
            parents, chosen = np.divmod(best, log_probs.shape[1])
            for parent, word, log_prob in zip(parents, chosen, candidates[best], strict=True):
                if word == END:
                    ids, alphas = beams[parent]
                    ended.append(
                        Hypothesis(ids, float(log_prob / length**length_normalization), True, np.array(alphas))
                    )
            parents, tokens, total = (values[chosen != END] for values in (parents, chosen, candidates[best]))
            beams = [
                ([*beams[parent][0], int(word)], [*beams[parent][1], results["alphas"][parent]])
                for parent, word in zip(parents, tokens, strict=True)
            ]
            if not beams:
                break
            state = {name: results[f"next.{name}"][parents] for name in state}
        for (ids, alphas), log_prob in zip(beams, total, strict=True):
            ended.append(Hypothesis(ids, float(log_prob / max_length**length_normalization), False, np.array(alphas)))
        return sorted(ended, key=lambda hypothesis: (not hypothesis.finished, -hypothesis.log_prob))


def _repeating(ids: list[int], n: int) -> list[int]:
    """Return the words after which the last n words of a caption would stand in it twice, and its last word."""
    last = ids[len(ids) - n + 1 :]
    return [*ids[-1:], *(ids[i + n - 1] for i in range(len(ids) - n + 1) if ids[i : i + n - 1] == last)]


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
    scaled = (resize, resize) if crop is None else tuple(int(resize * side / min(whole.size)) for side in whole.size)
    view = whole.resize(scaled, Image.Resampling[preprocessing["interpolation"].upper()])
    if crop is not None:
        left, top = (round((side - crop) / 2) for side in view.size)
        view = view.crop((left, top, left + crop, top + crop))
    pixels = np.asarray(view, np.float32).transpose(2, 0, 1)
    mean, std = (np.array(preprocessing[name], np.float32).reshape(3, 1, 1) * 255 for name in ("mean", "std"))
    return (pixels - mean) / std


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", help="a folder that `captioning export --onnx` wrote")
    parser.add_argument("images", metavar="IMAGE", nargs="+")
    for name, default in SEARCH.items():
        parser.add_argument(f"--{name}", type=type(default), help="(default: as the model was evaluated)")
    arguments = vars(parser.parse_args())
    folder, images = arguments.pop("folder"), arguments.pop("images")
    options = {name: value for name, value in arguments.items() if value is not None}
    try:
        captioner = OnnxCaptioner(folder)
    except Exception as error:  # onnxruntime raises many types
        print(f"error: {folder}: is no folder that `captioning export --onnx` wrote ({error})", file=sys.stderr)
        sys.exit(2)
    code = 0
    for path in images:
        try:
            text = captioner.text(captioner.caption(path, **options)[0])
        except (OSError, ValueError, SyntaxError) as error:  # of Pillow
            code = 2
            print(f"error: {path}: {error}", file=sys.stderr)
            continue
        # Control characters would command the terminal; the words are a file's.
        text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
        print(f"{path}\t{text}" if len(images) > 1 else text, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
