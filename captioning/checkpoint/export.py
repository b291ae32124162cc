"""A captioner as a folder that can be passed on: safetensors, JSON and a model card. Nothing in it runs.

``config.json`` has everything that rebuilds the model and prepares images.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from captioning.checkpoint.format import checkpoint_entry
from captioning.errors import InputError, check_choice
from captioning.files import read_json, replacing, write_json, write_text
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

    Args:
        settings: The full training configuration. config.json has only the file's name of an absolute path.
        card: The model card, in Markdown.
        dtype: Type in which the large parameters are stored. The model still computes in float32. The buffers and
            small parameters keep their types, because they need the digits.

    Raises:
        InputError: The folder cannot be written or has another program's model, or a weight is too large for ``dtype``.
    """
    from safetensors.torch import save

    check_choice(StoredType, dtype=dtype)
    is_ours = is_export(folder) and (folder / VOCABULARY).is_file()  # other libraries write no vocabulary.json
    for name in () if is_ours else (CARD, WEIGHTS, CONFIG, VOCABULARY):
        if (folder / name).exists():
            raise InputError(f"--output {folder}: has another program's {name}; choose an empty folder")
    weights = _stored_weights(captioner, dtype)
    with replacing(folder / WEIGHTS, "--output") as temporary:
        temporary.write_bytes(save(weights, metadata={"format": "pt"}))  # ``save_file`` lets its owner alone read it
    vocabulary.save(folder / VOCABULARY)
    _ = captioner.encoder.cells  # measures the cells, in a second; ``checkpoint_entry`` has only measured ones
    config = checkpoint_entry(captioner, vocabulary, settings)
    del config["vocabulary"]
    config = map_strings(lambda text: os.path.basename(text) if os.path.isabs(text) else text, config)
    write_json(folder / CONFIG, config)
    write_text(folder / CARD, card)


def read_export(folder: Path) -> dict[str, Any]:
    """Return the content and the weights of a folder as a checkpoint has them.

    Raises InputError if a file is missing or is no JSON, and any other exception if the content is damaged.
    """
    from safetensors.torch import load_file

    content = read_json(folder / CONFIG) | {"vocabulary": read_json(folder / VOCABULARY)["words"]}
    state = {f"captioner.{name}": tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    return {"captioning": content, "state_dict": state}


def _stored_weights(captioner: Captioner, dtype: StoredType) -> dict[str, Tensor]:
    """Return the model's state, with all parameters in ``dtype`` except those with less than 0.15 % of all numbers.

    In the pretrained captioner the smallest parameters are the biases, the depthwise convolutions and the encoder's
    first layers. Rounding them to float16 changed more captions than rounding all others.
    """
    sizes = {name: parameter.numel() for name, parameter in captioner.named_parameters(remove_duplicate=False)}
    large = {name for name, size in sizes.items() if size >= 0.0015 * sum(sizes.values())}
    weights = {}
    for name, tensor in captioner.state_dict().items():
        # Tied embeddings are one tensor with two names, and safetensors stores no tensor twice: each name gets a copy.
        copy = tensor.detach().cpu().contiguous().clone()
        weights[name] = copy.to(getattr(torch, dtype)) if name in large else copy
        if copy.isfinite().all() and not weights[name].isfinite().all():
            raise InputError(f"--dtype {dtype}: {name} is beyond its range; take bfloat16 or float32")
    return weights
