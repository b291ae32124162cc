"""A captioner as a folder that can be passed on: safetensors, JSON and a model card. Nothing in it runs.

``model.safetensors`` has the weights without the optimizer's state, ``config.json`` everything that rebuilds the model
and prepares images, ``vocabulary.json`` the words, and ``README.md`` is the model card. ``SHA256SUMS`` has checksums of
the first three, for ``sha256sum --check``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from captioning.checkpoint.format import describe
from captioning.errors import InputError
from captioning.files import is_lfs_pointer, read_json, replacing, sha256_of, write_json, write_text
from captioning.model.captioner import Captioner
from captioning.vocabulary import Vocabulary

WEIGHTS, CONFIG, VOCABULARY, CARD = "model.safetensors", "config.json", "vocabulary.json", "README.md"
CHECKSUMS = "SHA256SUMS"

StoredType = Literal["float32", "float16", "bfloat16"]

_SMALL = 0.03
"""Fraction of a model's parameters, those of the smallest tensors, that are always stored as they are."""


def is_export(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def refuse_other_folder(folder: Path) -> None:
    """Refuse to write over the files of something else, such as a model of another library.

    Raises:
        InputError: The folder has a file of an export's name, but is not an export.
    """
    is_ours = is_export(folder) and (folder / VOCABULARY).is_file()  # which folders of other models lack
    for name in () if is_ours else (CARD, WEIGHTS, CONFIG, VOCABULARY, CHECKSUMS):
        if (folder / name).exists():
            raise InputError(f"--output {folder}: has a {name} of something else; give a folder of its own")


def write_export(
    folder: Path,
    captioner: Captioner,
    vocabulary: Vocabulary,
    settings: Mapping[str, Any],
    card: str,
    *,
    dtype: StoredType = "float32",
) -> None:
    """Write a folder that ``read_export`` reads.

    Absolute paths in the settings are reduced to the file's name: they tell where files lay on another machine.

    Args:
        folder: The folder, which need not exist.
        captioner: The model.
        vocabulary: The words that the model knows.
        settings: The full configuration that the model was trained with.
        card: The model card, in Markdown.
        dtype: Type that the large parameters are stored in. The model still computes in float32. The smallest ones,
            3 % of all numbers, and the buffers keep their types: they need the digits, and are small.

    Raises:
        InputError: The folder cannot be written or has the README of something else, or a weight is beyond the range
            of the type.
    """
    from safetensors.torch import save

    refuse_other_folder(folder)
    weights = stored_weights(captioner, dtype)
    with replacing(folder / WEIGHTS, "--output") as part:
        part.write_bytes(save(weights, metadata={"format": "pt"}))  # save_file makes a file that only its owner reads
    config = describe(captioner, vocabulary, settings)
    write_json(folder / VOCABULARY, {"words": config.pop("vocabulary")}, indent=0)
    config["cells"] = dataclasses.asdict(captioner.encoder.cells)  # measuring them takes a second
    write_json(folder / CONFIG, _without_folders(config))
    write_text(folder / CARD, card)
    sums = [f"{sha256_of(folder / name)}  {name}\n" for name in (WEIGHTS, CONFIG, VOCABULARY)]
    write_text(folder / CHECKSUMS, "".join(sums))


def read_export(folder: Path) -> dict[str, Any]:
    """Return the content and the weights of a folder, arranged as in a checkpoint.

    Raises:
        InputError: A file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for name in (WEIGHTS, CONFIG, VOCABULARY):
        if is_lfs_pointer(folder / name):
            raise InputError(f"{folder / name}: is the pointer of git-LFS, not the file; run git lfs pull")
    config, words = read_json(folder / CONFIG), read_json(folder / VOCABULARY)
    if not isinstance(config, dict) or not isinstance(words, dict):
        raise InputError(f"{folder}: {CONFIG} or {VOCABULARY} is not what captioning export writes; export it again")
    try:
        weights = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{folder / WEIGHTS}: damaged ({error}); export it again") from error
    state = {f"captioner.{name}": tensor for name, tensor in weights.items()}
    return {"captioning": config | {"vocabulary": words.get("words")}, "state_dict": state}


def stored_weights(captioner: Captioner, dtype: StoredType) -> dict[str, Tensor]:
    """Return the model's state with its large parameters in the type.

    Raises:
        InputError: A parameter is beyond the range of the type.
    """
    large = _large_parameters(captioner)
    stored = {}
    for name, tensor in captioner.state_dict().items():
        # Tied embeddings are one tensor with two names. The format takes no tensor twice, so each name gets a copy.
        stored[name] = tensor.detach().cpu().contiguous().clone()
        if name in large:
            stored[name] = stored[name].to(getattr(torch, dtype))
            if tensor.isfinite().all() and not stored[name].isfinite().all():
                raise InputError(f"--dtype {dtype}: {name} is beyond its range; take bfloat16 or float32")
    return stored


def _large_parameters(captioner: Captioner) -> set[str]:
    """Return the names of all parameters but the smallest ones, which together have 3 % of the numbers.

    Of the pretrained captioner these are the biases, the depthwise convolutions and the first layers of its encoder.
    Rounded to float16, they changed more captions than all others together.
    """
    sizes = {name: parameter.numel() for name, parameter in captioner.named_parameters(remove_duplicate=False)}
    by_size = sorted(sizes, key=sizes.__getitem__)
    cumulated = np.cumsum([sizes[name] for name in by_size])
    return set(by_size[np.searchsorted(cumulated, _SMALL * cumulated[-1], side="right") :])


def _without_folders(value: Any) -> Any:
    """Return plain data in which an absolute path is only its last part."""
    if isinstance(value, dict):
        return {name: _without_folders(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_folders(item) for item in value]
    return os.path.basename(value) if isinstance(value, str) and os.path.isabs(value) else value
