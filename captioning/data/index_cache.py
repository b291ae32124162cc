"""The index of a large annotation file, kept in the user's cache folder under the hash of what it was made from.

Nothing is cached beside the data: a file there could come from somebody else.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from captioning.data.records import CaptionIndex, PackedStrings
from captioning.files import cache_folder
from captioning.tokenizers import Tokenizer

logger = logging.getLogger(__name__)

SMALLEST = 16 << 20
"""Bytes; a smaller file is read in less than a second without a cache."""
_FORMAT = 1
_TENSORS = ("image_ids", "caption_lengths", "first_caption", "caption_image")
_STRINGS = ("paths", "captions")


def cached_index(
    file: Path, options: tuple[object, ...], root: Path, build: Callable[[], CaptionIndex], tokenizer: Tokenizer
) -> CaptionIndex:
    """Return ``build()``, or what an earlier call with the same options returned for a file of the same content.

    Args:
        file: of the annotations; all of it is hashed, so that no edit is missed.
        options: whatever else the index depends on, its root excepted.
        root: the index's.
        tokenizer: of the captions; with a user's own nothing is cached, because it may change under its name.
    """
    ours = type(tokenizer).__module__ == Tokenizer.__module__
    if not ours or file.stat().st_size < SMALLEST:
        return build()
    name = type(tokenizer).__name__
    key = hashlib.sha256(repr((_FORMAT, version("nltk"), *options, name)).encode())  # nltk: of the tokeniser
    with file.open("rb") as content:
        for part in iter(lambda: content.read(1 << 20), b""):
            key.update(part)
    path = cache_folder(f"index-{key.hexdigest()[:32]}.npz")
    found = _read(path, root)
    if found is not None:
        found.warn_left_out()
        return found
    with _without_collection():
        index = build()
    _write(path, index)
    return index


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Let no garbage be collected: a million objects, none of them garbage, would be searched again and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _read(path: Path, root: Path) -> CaptionIndex | None:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            found = {name: stored[name] for name in stored.files}
            origin = str(found.pop("origin"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("%s: damaged (%s), made again", path, error)
        return None
    arrays = {name: torch.from_numpy(array) for name, array in found.items()}
    strings = {name: PackedStrings(arrays.pop(f"{name}.blob"), arrays.pop(f"{name}.offsets")) for name in _STRINGS}
    left_out: Tensor = arrays.pop("left_out")
    empty, bare = left_out.tolist()
    return CaptionIndex(root=root, origin=origin, left_out=(empty, bare), **strings, **arrays)  # type: ignore[arg-type]


def _write(path: Path, index: CaptionIndex) -> None:
    arrays = {name: getattr(index, name).numpy() for name in _TENSORS}
    for name in _STRINGS:
        strings = getattr(index, name)
        arrays |= {f"{name}.blob": strings.blob.numpy(), f"{name}.offsets": strings.offsets.numpy()}
    arrays |= {"left_out": np.array(index.left_out), "origin": np.array(index.origin)}
    # Several processes of a run do this at once, and one that cannot write goes on without.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
            os.replace(part, path)
        except OSError:
            os.unlink(part)
