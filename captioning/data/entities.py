"""Flickr30k Entities (Plummer et al. 2015): boxes of the phrases of Flickr30k's and Flickr8k's captions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from captioning.data.images import formats, upright_size
from captioning.data.records import Phrase
from captioning.errors import InputError, one_line

_PHRASE = re.compile(r"\[/EN#(\d+)/\S+ ([^]]*)\]")


class Entities:
    """Reads the annotations as they are published: ``Annotations/NUMBER.xml`` and ``Sentences/NUMBER.txt``.

    Args:
        folder: The folder with both.

    Raises:
        InputError: The folder lacks one of them.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if missing := [name for name in ("Annotations", "Sentences") if not (self.folder / name).is_dir()]:
            raise InputError(
                f"{self.folder}: has no folder {missing[0]}; unpack annotations.zip of Flickr30k Entities there, see "
                "data/README.md"
            )

    def phrases(self, path: Path, captions: Sequence[str]) -> list[list[Phrase]]:
        """Return the phrases with boxes of each caption of an image; [] for one that Entities does not have.

        Args:
            path: The image's file, whose name begins with its number on Flickr.
            captions: Its captions, words joined by spaces.
        """
        if not any(sentences := self.sentences(path, captions)):
            return [[] for _ in captions]
        masks = self._masks(_number(path), path)
        pairs = zip(sentences, captions, strict=True)
        return [_phrases(sentence, caption.split(), masks) for sentence, caption in pairs]

    def sentences(self, path: Path, captions: Sequence[str]) -> list[str]:
        """Return the marked sentence of each caption of an image, "" for one that Entities does not have."""
        with suppress(FileNotFoundError):
            lines = (self.folder / "Sentences" / f"{_number(path)}.txt").read_text("utf-8").splitlines()
            known = {_letters(_PHRASE.sub(r"\2", line)): line for line in lines}
            return [known.get(_letters(caption), "") for caption in captions]
        return [""] * len(captions)

    def _masks(self, number: str, path: Path) -> dict[str, np.ndarray]:
        """Return a mask of the upright image for each entity that has boxes, by its number."""
        file = self.folder / "Annotations" / f"{number}.xml"
        try:
            root = ElementTree.parse(file).getroot()
            width, height = (int(root.findtext(f"size/{side}", "")) for side in ("width", "height"))
        except (OSError, ElementTree.ParseError, ValueError) as error:
            raise InputError(f"{file}: not an annotation of Flickr30k Entities ({one_line(error)})") from error
        stored = (width, height)
        with suppress(OSError), Image.open(path, formats=formats()) as image:
            stored = upright_size(image)  # the image may be stored smaller, or squashed
        masks: dict[str, np.ndarray] = {}
        for item in root.iter("object"):
            if (box := item.find("bndbox")) is None:
                continue
            left, top, right, bottom = (float(box.findtext(side, "")) for side in ("xmin", "ymin", "xmax", "ymax"))
            columns = slice(*(round(x * stored[0] / width) for x in (left - 1, right)))  # pixels count from 1
            rows = slice(*(round(y * stored[1] / height) for y in (top - 1, bottom)))
            for name in item.findall("name"):
                masks.setdefault(str(name.text), np.zeros(stored[::-1], dtype=bool))[rows, columns] = True
        return masks


def _phrases(sentence: str, words: Sequence[str], masks: dict[str, np.ndarray]) -> list[Phrase]:
    """Return the phrases of a sentence of Entities in a caption's words, which may be split otherwise."""
    ends = np.cumsum([len(_letters(word)) for word in words])  # of words, in letters from the beginning
    found, letters, place = [], 0, 0
    for match in _PHRASE.finditer(sentence):
        letters += len(_letters(sentence[place : match.start()]))
        start, letters, place = letters, letters + len(_letters(match[2])), match.end()
        first, last = int(np.searchsorted(ends, start, "right")), int(np.searchsorted(ends, letters, "left"))
        if match[1] in masks and letters > start:
            found.append(Phrase(first, min(last + 1, len(words)), masks[match[1]]))
    return found


def _number(path: Path) -> str:
    """Return an image's number on Flickr, with which the name of its file begins."""
    return path.name[: len(path.name) - len(path.name.lstrip("0123456789"))]


def _letters(text: str) -> str:
    """Return the letters and digits of a text, which do not depend on how it was split into words."""
    return "".join(filter(str.isalnum, text.lower()))
