"""Files of captions in the format of the COCO server, and files of references to compare them with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from captioning.errors import InputError
from captioning.files import read_json, write_json
from captioning.tokenizers import Tokenizer


class ImageCaption(msgspec.Struct):
    """An entry of a file: a caption, and the number of its image."""

    image_id: int
    caption: str


def converted(path: Path, content: Any, kind: Any, expected: str) -> Any:
    """Return the content of a JSON file as this type, or raise an InputError that says what was expected."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: expected {expected}: {error}") from error


def write_results(path: Path, captions: Iterable[tuple[int, str]]) -> None:
    """Write numbers of images and captions as the COCO server takes them, ``[{"image_id": 17, "caption": ..}, ..]``."""
    write_json(path, [{"image_id": i, "caption": caption} for i, caption in captions], indent=None)


def read_results(path: Path) -> dict[int, str]:
    """Return the captions of a results file by image number.

    Raises:
        InputError: The file cannot be read, an entry lacks a field or has a wrong one, or an image appears twice.
    """
    captions: dict[int, str] = {}
    for entry in converted(path, read_json(path), list[ImageCaption], '[{"image_id": 17, "caption": "a dog"}, ..]'):
        if entry.image_id in captions:
            raise InputError(f"{path}: image_id {entry.image_id} has two captions; only one is allowed")
        captions[entry.image_id] = entry.caption
    if not captions:
        raise InputError(f"{path}: holds no caption")
    return captions


def read_references(path: Path, *, split: str, tokenizer: Tokenizer) -> tuple[dict[int, list[list[str]]], str]:
    """Return the word lists of each image's references, by image number, and a description of the words.

    Captions of a COCO annotation file (``captions_val2017.json``) are tokenised. A Karpathy split file
    (``dataset_coco.json``) has tokens of its own, which the default tokenizer keeps; its images are numbered by
    ``cocoid``, or by ``imgid`` if they have none. References without a word are left out.

    Args:
        path: The file.
        split: Split of a Karpathy file; a COCO file holds one split.
        tokenizer: Tokenizer of the captions.

    Raises:
        InputError: The file cannot be read, is neither of both, has a wrong field, or holds no reference.
    """
    content = read_json(path)
    references: dict[int, list[list[str]]] = {}
    tokens = tokenizer.description
    if isinstance(content, dict) and "annotations" in content:
        for entry in converted(path, content["annotations"], list[ImageCaption], "COCO's annotations"):
            if words := tokenizer.tokenize(entry.caption):
                references.setdefault(entry.image_id, []).append(words)
    elif isinstance(content, dict) and "images" in content:
        from captioning.data.karpathy import KarpathySource

        source = KarpathySource(str(path), image_dir="")
        source.tokenizer = tokenizer
        index, tokens = source.index(split), source.tokens
        for row, image_id in enumerate(index.image_ids.tolist()):
            references[image_id] = [caption.split() for caption in index.references(row)]
    else:
        raise InputError(f"{path}: no references, expected COCO's annotations or Karpathy's images")
    if not references:
        raise InputError(f"{path}: holds no caption")
    return references, tokens


def pair(
    captions: dict[int, str], references: dict[int, list[list[str]]], *, where: Path, tokenizer: Tokenizer
) -> tuple[list[list[str]], list[list[list[str]]]]:
    """Return the words of each caption, and the references of its image in the same order.

    Images with references and no caption are left out. An InputError names the file of the captions, ``where``, if an
    image with a caption has no references.
    """
    if unknown := [image_id for image_id in captions if image_id not in references]:
        raise InputError(
            f"{where}: {len(unknown)} of {len(captions)} images have no references, among them image_id {unknown[0]}"
        )
    words = [tokenizer.tokenize(caption) for caption in captions.values()]
    return words, [references[image_id] for image_id in captions]
