"""Files of captions in the format of the COCO server, and files of references to score them against."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from captioning.errors import InputError
from captioning.files import read_json, write_json
from captioning.tokenizers import PennTreebank, Tokenizer

MAX_ID = 2**63 - 1


def write_results(path: Path, captions: Iterable[tuple[int, str]]) -> None:
    """Write captions as the COCO server takes them, ``[{"image_id": 17, "caption": "a dog"}, ..]``.

    Args:
        path: The server expects the name ``captions_<split>_<algorithm>_results.json``.
        captions: Number and caption of each image.

    Raises:
        ValueError: An image appears twice.
    """
    results: dict[int, str] = {}
    for image_id, caption in captions:
        if image_id in results:
            raise ValueError(f"image {image_id} has two captions; the server takes one")
        results[image_id] = caption
    write_json(path, [{"image_id": i, "caption": caption} for i, caption in results.items()], indent=None, follow=False)


def read_results(path: Path) -> dict[int, str]:
    """Return the captions of a results file by image number.

    Raises:
        InputError: The file cannot be read, an entry lacks a field or has a wrong one, or an image appears twice.
    """
    content = read_json(path)
    if not isinstance(content, list) or not content:
        raise InputError(f'{path}: no results, expected [{{"image_id": 17, "caption": "a dog"}}, ..]')
    captions: dict[int, str] = {}
    for index, (image_id, caption) in _captions(path, "entry", content):
        if image_id in captions:
            raise InputError(f"{path}: entry {index}: image_id {image_id} has a caption already; only one is allowed")
        captions[image_id] = caption
    return captions


class References(NamedTuple):
    """The word lists of each image's references, by image number, and a description of the words."""

    words: dict[int, list[list[str]]]
    tokens: str


def read_references(
    path: Path,
    *,
    split: str = "test",
    tokenizer: Tokenizer = PennTreebank(),  # noqa: B008 - no state
) -> References:
    """Read the references of images.

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
    if isinstance(content, dict) and isinstance(content.get("annotations"), list):
        for _, (image_id, caption) in _captions(path, "annotation", content["annotations"]):
            if words := tokenizer.tokenize(caption):
                references.setdefault(image_id, []).append(words)
    elif isinstance(content, dict) and isinstance(content.get("images"), list):
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
    return References(references, tokens)


def pair(
    captions: dict[int, str],
    references: dict[int, list[list[str]]],
    *,
    where: Path,
    tokenizer: Tokenizer = PennTreebank(),  # noqa: B008 - no state
) -> tuple[list[list[str]], list[list[list[str]]]]:
    """Return the words of each caption, and the references of its image in the same order.

    Images with references and no caption are left out.

    Args:
        where: File of the captions, for the message.

    Raises:
        InputError: An image with a caption has no references.
    """
    if unknown := [image_id for image_id in captions if image_id not in references]:
        raise InputError(
            f"{where}: {len(unknown)} of {len(captions)} images have no references, among them image_id {unknown[0]}"
        )
    words = [tokenizer.tokenize(caption) for caption in captions.values()]
    return words, [references[image_id] for image_id in captions]


def _captions(path: Path, kind: str, entries: list[Any]) -> Iterator[tuple[int, tuple[int, str]]]:
    """Yield the position of each entry, and its image number and caption."""
    for index, entry in enumerate(entries):
        where = f"{path}: {kind} {index}"
        if not isinstance(entry, dict):
            raise InputError(f"{where} is not an object with image_id and caption, got {_short(entry)}")
        for field in ("image_id", "caption"):
            if field not in entry:
                raise InputError(f"{where} has no {field}")
        image_id, caption = entry["image_id"], entry["caption"]
        if not isinstance(image_id, int) or isinstance(image_id, bool) or abs(image_id) > MAX_ID:
            raise InputError(f"{where}: image_id must be a whole number, got {_short(image_id)}")
        if not isinstance(caption, str):
            raise InputError(f"{where}: caption must be a text, got {_short(caption)}")
        yield index, (image_id, caption)


def _short(value: Any) -> str:
    return repr(value)[:60]
