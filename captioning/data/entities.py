"""Flickr30k Entities (Plummer et al. 2015): boxes of the phrases of Flickr30k's and Flickr8k's captions."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from captioning.data.images import formats, turn_upright
from captioning.data.records import Phrase
from captioning.errors import InputError

_PHRASE = re.compile(r"\[/EN#(\d+)/\S+ ([^]]*)\]")


class Entities:
    """Reads the published annotations of a folder: ``Annotations/NUMBER.xml`` and ``Sentences/NUMBER.txt``."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        for name in ("Annotations", "Sentences"):
            if not (self.folder / name).is_dir():
                raise InputError(f"{self.folder}: has no folder {name}; unpack Entities' annotations.zip there")

    def phrases(self, path: Path, captions: Sequence[str]) -> list[list[Phrase]]:
        """Return each caption's phrases that have boxes; [] for a caption that Entities lacks.

        The name of the image file, ``path``, begins with the image's number on Flickr.
        """
        sentences = self.sentences(path, captions)
        if not any(sentences):
            return [[] for _ in captions]
        masks = _masks(self.folder / "Annotations" / f"{_number(path)}.xml", path)
        return [_phrases(line, caption.split(), masks) for line, caption in zip(sentences, captions, strict=True)]

    def sentences(self, path: Path, captions: Sequence[str]) -> list[str]:
        """Return each caption's sentence with marked phrases, "" for a caption that Entities lacks."""
        file = self.folder / "Sentences" / f"{_number(path)}.txt"
        lines = file.read_text("utf-8").splitlines() if file.is_file() else []
        by_letters = {_letters(_PHRASE.sub(r"\2", line)): line for line in lines}
        return [by_letters.get(_letters(caption), "") for caption in captions]


def _masks(file: Path, image_path: Path) -> dict[str, np.ndarray]:
    """Return masks (height, width) bool of the upright image by entity number; an entity without boxes has none."""
    root = ElementTree.parse(file).getroot()
    width, height = (int(root.findtext(f"size/{side}", "")) for side in ("width", "height"))
    size = width, height
    with suppress(OSError), Image.open(image_path, formats=formats()) as image:
        size = turn_upright(Image.new("1", image.size), image).size  # the file may have another size or aspect
    masks: dict[str, np.ndarray] = {}
    for item in root.iter("object"):
        if (box := item.find("bndbox")) is None:
            continue
        left, top, right, bottom = (float(box.findtext(side, "")) for side in ("xmin", "ymin", "xmax", "ymax"))
        columns = slice(*(round(x * size[0] / width) for x in (left - 1, right)))  # pixels count from 1
        rows = slice(*(round(y * size[1] / height) for y in (top - 1, bottom)))
        for name in item.findall("name"):
            masks.setdefault(str(name.text), np.zeros(size[::-1], dtype=bool))[rows, columns] = True
    return masks


def _phrases(sentence: str, words: Sequence[str], masks: dict[str, np.ndarray]) -> list[Phrase]:
    """Return a caption's phrases. Letters are counted, because the sentence may be split into words differently."""
    ends = np.cumsum([len(_letters(word)) for word in words])  # letters up to the end of each word
    phrases, letters, position = [], 0, 0
    for match in _PHRASE.finditer(sentence):
        letters += len(_letters(sentence[position : match.start()]))
        start, letters, position = letters, letters + len(_letters(match[2])), match.end()
        first, last = int(np.searchsorted(ends, start, "right")), int(np.searchsorted(ends, letters, "left"))
        if match[1] in masks and letters > start:
            phrases.append(Phrase(first, min(last + 1, len(words)), masks[match[1]]))
    return phrases


def _number(path: Path) -> str:
    return re.split(r"[^0-9]", path.name, maxsplit=1)[0]


def _letters(text: str) -> str:
    """Return the letters and digits of a text, the same for any split into words."""
    return "".join(filter(str.isalnum, text.lower()))
