#!/usr/bin/env python
"""Caption images with onnxruntime, NumPy and Pillow alone: no PyTorch, and nothing of this repository but this file.

The folder is one that `captioning export CHECKPOINT --output DIR --onnx` wrote. Its captions are those of the
checkpoint, word for word.

examples:
  python scripts/caption_onnx.py exported/mine photo.jpg
  python scripts/caption_onnx.py exported/mine a.jpg b.jpg --beam_size 1
"""

from __future__ import annotations

import argparse
import io
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
CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")  # but tabs


RANGES: dict[str, tuple[type, float, float]] = {
    "beam_size": (int, 1, 1000),
    "length_normalization": (float, -10, 10),
    "max_length": (int, 1, 1000),
    "min_length": (int, 0, 1000),
}
MAX_PIXELS = 100_000_000


class Refused(Exception):
    """A folder, an image or an option that cannot be used. The message is one line: what, and why."""


class Hypothesis(NamedTuple):
    """A caption that the search ended with.

    Attributes:
        ids: T word ids.
        score: Sum of the log-probabilities, divided by the length normalisation.
        finished: False if the maximum length cut the caption off.
        alphas: (T, L), the attention at each word, over the locations of the image row by row.
    """

    ids: list[int]
    score: float
    finished: bool
    alphas: np.ndarray


class OnnxCaptioner:
    """The two graphs of an exported folder, with its words and its preprocessing.

    Raises:
        Refused: The folder is damaged, or was exported without graphs.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self.config, vocabulary = read_json(folder / "config.json"), read_json(folder / "vocabulary.json")
        self.words = vocabulary.get("words")
        if not isinstance(self.words, list) or not all(isinstance(word, str) and word for word in self.words):
            raise Refused(f"{folder / 'vocabulary.json'}: has no list of words; export the folder again")
        try:
            check_preprocessing(self.config.get("preprocessing"))
        except Refused as error:
            raise Refused(f"{folder / 'config.json'}: {error}; export the folder again") from error
        self.encoder, self.step = open_graph(folder / "encoder.onnx"), open_graph(folder / "step.onnx")
        self.search = {"beam_size": 3, "length_normalization": 0.0, "max_length": 30, "min_length": 1}
        configured = inside(self.config, "settings", "model", "search")
        self.search |= {name: value for name, value in configured.items() if name in self.search}
        tokenizer = inside(self.config, "tokenizer").get("class_path")
        self.spaced = not str(tokenizer).endswith(".Characters")

    def __call__(self, path: str | Path, **options: Any) -> str:
        """Return the best caption of an image file. Options are those of ``beam_search``."""
        return self.text(self.caption(path, **options)[0])

    def caption(self, path: str | Path, **options: Any) -> list[Hypothesis]:
        """Return the captions of a beam search, best first.

        Raises:
            Refused: The image cannot be read, a graph does not fit, or an option is out of its range.
        """
        search = self.options(**options)
        images = prepare(path, self.config["preprocessing"])[None]
        try:
            names = [output.name for output in self.encoder.get_outputs()]
            parts = dict(zip(names, self.encoder.run(None, {"images": images}), strict=True))
            return self.beam_search(parts, **search)
        except Refused:
            raise
        except Exception as error:  # onnxruntime raises many types
            raise Refused(f"the graphs do not fit each other or config.json ({_reason(error)})") from error

    def options(self, **given: Any) -> dict[str, Any]:
        """Return the options of ``beam_search``: those that are given, and the others as the model was evaluated.

        Raises:
            Refused: Names one that is out of its range.
        """
        search = self.search | given
        for name, (kind, low, high) in RANGES.items():
            value = search[name]
            if type(value) not in (int, kind) or not low <= value <= high:
                raise Refused(f"{name} must be in {low} .. {high}, got {str(value)[:60]}")
        return search

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
            if log_probs.shape[1] != SPECIALS + len(self.words):
                raise Refused(f"the graphs know {log_probs.shape[1] - SPECIALS} words, not {len(self.words)}")
            log_probs[:, [PAD, START, UNK, *([END] if length <= min_length else [])]] = -np.inf
            candidates = (total[:, None] + log_probs).ravel()
            best = np.argsort(-candidates, kind="stable")[: beam_size - len(ended)]
            best = best[np.isfinite(candidates[best])]
            parents, chosen = np.divmod(best, log_probs.shape[1])
            scores = candidates[best] / length**length_normalization
            going_on, followed = [], []
            for row, (parent, word, score) in enumerate(zip(parents.tolist(), chosen.tolist(), scores, strict=True)):
                ids, alphas = beams[parent]
                if word == END:
                    ended.append(Hypothesis(ids, float(score), True, np.array(alphas)))
                    continue
                followed.append(([*ids, word], [*alphas, results["alphas"][parent]]))
                going_on.append(row)
                if length == max_length:
                    ended.append(Hypothesis(followed[-1][0], float(score), False, np.array(followed[-1][1])))
            if not going_on:
                break
            beams, total, tokens = followed, candidates[best[going_on]], chosen[going_on].astype(np.int64)
            state = {name.removeprefix("next."): results[name][parents[going_on]] for name in carried}
        if not ended:
            raise Refused("the model gives no word a finite probability")
        return sorted(ended, key=lambda hypothesis: (not hypothesis.finished, -hypothesis.score))


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise Refused(f"{path}: cannot be read ({error.strerror}); was the folder exported with --onnx?") from error
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path}: is no JSON ({_reason(error)})") from error
    if not isinstance(content, dict):
        raise Refused(f"{path}: is not what captioning export writes")
    return content


def inside(settings: Any, *names: str) -> dict[str, Any]:
    """Return the section of nested settings; {} if there is none."""
    for name in names:
        settings = settings.get(name) if isinstance(settings, dict) else None
    return settings if isinstance(settings, dict) else {}


def open_graph(path: Path) -> onnxruntime.InferenceSession:
    if not path.is_file():
        raise Refused(f"{path}: no such file; export the folder with --onnx")
    try:
        return onnxruntime.InferenceSession(path, providers=onnxruntime.get_available_providers())
    except Exception as error:  # onnxruntime raises many types
        raise Refused(f"{path}: is no graph, or a damaged one ({_reason(error)})") from error


def check_preprocessing(values: Any) -> None:
    """Refuse preprocessing that captioning export does not write.

    Raises:
        Refused: Names the value.
    """
    if not isinstance(values, dict):
        raise Refused("has no preprocessing")
    resize, crop = values.get("resize"), values.get("crop")
    if type(resize) is not int or not 1 <= resize <= 10_000:
        raise Refused(f"preprocessing: resize must be in 1 .. 10000 pixels, got {str(resize)[:60]}")
    if crop is not None and (type(crop) is not int or not 1 <= crop <= resize):
        raise Refused(f"preprocessing: crop must be in 1 .. {resize} pixels, got {str(crop)[:60]}")
    for name, low in (("mean", -1e6), ("std", 1e-6)):
        three = values.get(name)
        numbers = isinstance(three, list) and all(type(value) in (int, float) for value in three)
        if not numbers or len(three) != 3 or not all(low <= value <= 1e6 for value in three):
            raise Refused(f"preprocessing: {name} must be three numbers of at least {low}, got {str(three)[:60]}")
    if str(values.get("interpolation")).upper() not in Image.Resampling.__members__:
        raise Refused(f"preprocessing: interpolation {str(values.get('interpolation'))[:60]} is not known")


def prepare(path: str | Path, preprocessing: dict[str, Any]) -> np.ndarray:
    """Return an image file as the encoder's input, (3, height, width) float32.

    Raises:
        Refused: It cannot be read, or is too narrow.
    """
    resize, crop = preprocessing["resize"], preprocessing.get("crop")
    if not Path(path).is_file():
        raise Refused("no such image file")
    try:
        with Image.open(path, formats=FORMATS) as image:
            if image.format == "JPEG":  # decoded at 1/2, 1/4 or 1/8 of its size if that is large enough
                scale = resize / min(image.size)
                image.draft(None, (math.ceil(image.width * scale), math.ceil(image.height * scale)))
            image.load()
            whole = _rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # a damaged file makes Pillow raise errors of many types
        raise Refused(f"cannot be read as an image ({_reason(error)})") from error
    if crop is not None and resize * int(resize * max(whole.size) / min(whole.size)) > MAX_PIXELS:
        raise Refused(f"{whole.width} x {whole.height} pixels are too narrow for a short side of {resize}; cut it")
    filters = Image.Resampling[preprocessing["interpolation"].upper()]
    if crop is None:
        view = whole.resize((resize, resize), filters)
    else:
        width, height = whole.size
        long = int(resize * max(whole.size) / min(whole.size))
        view = whole.resize((resize, long) if width <= height else (long, resize), filters)
        left, top = (round((side - crop) / 2) for side in view.size)
        view = view.crop((left, top, left + crop, top + crop))
    pixels = np.asarray(view, np.float32).transpose(2, 0, 1)
    mean, std = (np.array(preprocessing[name], np.float32).reshape(3, 1, 1) * 255 for name in ("mean", "std"))
    return (pixels - mean) / std


def _rgb(image: Image.Image) -> Image.Image:
    """Return 8-bit RGB, with 16-bit values scaled and transparency on white."""
    if image.mode.startswith("I"):
        grey = np.clip(np.asarray(image, np.int64), 0, 65535) // 257
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        canvas = Image.new("RGB", image.size, "white")
        canvas.paste(rgba, mask=rgba.getchannel("A"))
        return canvas
    return image.convert("RGB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", help="a folder that `captioning export --onnx` wrote")
    parser.add_argument("images", metavar="IMAGE", nargs="+")
    for name, kind in (("beam_size", int), ("length_normalization", float), ("max_length", int), ("min_length", int)):
        parser.add_argument(f"--{name}", type=kind, help="(default: as the model was evaluated)")
    arguments = vars(parser.parse_args())
    folder, images = arguments.pop("folder"), arguments.pop("images")
    options = {name: value for name, value in arguments.items() if value is not None}
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for characters that the terminal's encoding lacks
    try:
        captioner = OnnxCaptioner(folder)
        options = captioner.options(**options)
    except Refused as error:
        print(_printable(f"error: {error}"), file=sys.stderr)
        sys.exit(2)
    captioned = [_captioned(captioner, path, options, several=len(images) > 1) for path in images]
    sys.exit(0 if all(captioned) else 2)


def _printable(text: str) -> str:
    """Return text with control characters escaped, which would command the terminal; the words are a file's."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def _captioned(captioner: OnnxCaptioner, path: str, options: dict[str, Any], *, several: bool) -> bool:
    """Print the caption of an image, or one line on standard error. Return whether the image was captioned."""
    try:
        text = captioner(path, **options)
    except Refused as error:
        print(_printable(f"error: {path}: {error}"), file=sys.stderr)
        return False
    print(_printable(f"{path}\t{text}" if several else text), flush=True)
    return True


if __name__ == "__main__":
    main()
