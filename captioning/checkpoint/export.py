"""A captioner as a folder that can be passed on: safetensors, JSON and a model card. Nothing in it runs.

``config.json`` has everything that rebuilds the model and prepares images.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from captioning.checkpoint.format import checkpoint_entry
from captioning.errors import InputError, check_choice
from captioning.files import read_json, refuse_lfs_pointer, replacing, write_json, write_text
from captioning.model.captioner import Captioner
from captioning.settings import map_strings
from captioning.vocabulary import Vocabulary

WEIGHTS, CONFIG, VOCABULARY, CARD = "model.safetensors", "config.json", "vocabulary.json", "README.md"

StoredType = Literal["float32", "float16", "bfloat16"]


def is_export(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


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

    An absolute path in the settings, which are the full training configuration, is reduced to the file's name.

    Args:
        card: The model card, in Markdown.
        dtype: Type that the large parameters are stored in. The model still computes in float32. The smallest
            parameters, 2 % of all numbers, and the buffers keep their types, because they need the digits.

    Raises:
        InputError: The folder cannot be written or has other files, or a weight is out of the type's range.
    """
    from safetensors.torch import save

    check_choice(StoredType, dtype=dtype)
    is_ours = is_export(folder) and (folder / VOCABULARY).is_file()  # other libraries write no vocabulary.json
    for name in () if is_ours else (CARD, WEIGHTS, CONFIG, VOCABULARY):
        if (folder / name).exists():
            raise InputError(f"--output {folder}: has another program's {name}; choose an empty folder")
    weights = _stored_weights(captioner, dtype)
    with replacing(folder / WEIGHTS, "--output") as temporary:
        temporary.write_bytes(save(weights, metadata={"format": "pt"}))  # save_file's is private to its owner
    vocabulary.save(folder / VOCABULARY)
    _ = captioner.encoder.cells  # measured here, which takes a second, so that ``checkpoint_entry`` knows them
    config = checkpoint_entry(captioner, vocabulary, settings)
    del config["vocabulary"]
    without_folder = map_strings(lambda text: os.path.basename(text) if os.path.isabs(text) else text, config)
    write_json(folder / CONFIG, without_folder)
    write_text(folder / CARD, card)


def read_export(folder: Path) -> dict[str, Any]:
    """Return the content and the weights of a folder, arranged as in a checkpoint.

    Raises InputError if a file is missing or is no JSON, and any other exception if the content is damaged.
    """
    from safetensors.torch import load_file

    refuse_lfs_pointer(folder / WEIGHTS)
    content = read_json(folder / CONFIG) | {"vocabulary": read_json(folder / VOCABULARY)["words"]}
    state = {f"captioner.{name}": tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    return {"captioning": content, "state_dict": state}


def _stored_weights(captioner: Captioner, dtype: StoredType) -> dict[str, Tensor]:
    """Return the model's state, with all parameters in ``dtype`` except the smallest ones, 2 % of all numbers.

    In the pretrained captioner the smallest parameters are the biases, the depthwise convolutions and the encoder's
    first layers. Rounding them to float16 changed more captions than rounding all others.
    """
    sizes = {name: parameter.numel() for name, parameter in captioner.named_parameters(remove_duplicate=False)}
    by_size = sorted(sizes, key=sizes.__getitem__)
    cumulated = np.cumsum([sizes[name] for name in by_size])
    large = set(by_size[np.searchsorted(cumulated, 0.02 * cumulated[-1], side="right") :])
    stored = {}
    for name, tensor in captioner.state_dict().items():
        # Tied embeddings are one tensor with two names, and safetensors stores no tensor twice: each name gets a copy.
        kept = tensor.detach().cpu().contiguous().clone()
        stored[name] = kept.to(getattr(torch, dtype)) if name in large else kept
        if kept.isfinite().all() and not stored[name].isfinite().all():
            raise InputError(f"--dtype {dtype}: {name} is beyond its range; take bfloat16 or float32")
    return stored
