"""A captioner as a folder that can be passed on: safetensors, JSON and a model card, nothing that runs.

``model.safetensors`` has the weights without the optimizer's state, ``config.json`` what rebuilds the model and how
images are prepared, ``vocabulary.json`` the words, ``README.md`` says what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from captioning.errors import InputError
from captioning.files import read_json, replacing, write_json, write_text

WEIGHTS, CONFIG, VOCABULARY, CARD = "model.safetensors", "config.json", "vocabulary.json", "README.md"


def is_export(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def refuse_other_folder(folder: Path) -> None:
    """Raises:
    InputError: an export would write over the README of something else.
    """
    ours = all((folder / name).is_file() for name in (CONFIG, WEIGHTS, VOCABULARY))  # the last one other models lack
    if (folder / CARD).exists() and not ours:
        raise InputError(f"--output {folder}: has a {CARD} of something else; give a folder of its own")


def write_export(folder: Path, content: Mapping[str, Any], weights: Mapping[str, Tensor], card: str) -> None:
    """Write a folder that ``read_export`` takes back.

    Args:
        content: what a checkpoint's "captioning" entry holds.
        weights: of the captioner.
        card: Markdown.

    Raises:
        InputError: it cannot be written, or would write over another folder's README.
    """
    from safetensors.torch import save

    refuse_other_folder(folder)
    with replacing(folder / WEIGHTS, "--output") as part:
        # Tied embeddings are one tensor under two names, and the format takes no tensor twice: so copies.
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
        part.write_bytes(save(tensors, metadata={"format": "pt"}))  # its own writer makes a file for the owner alone
    write_json(folder / VOCABULARY, {"words": list(content["vocabulary"])}, indent=0)
    write_json(folder / CONFIG, {name: value for name, value in content.items() if name != "vocabulary"})
    write_text(folder / CARD, card)


def read_export(folder: Path) -> dict[str, Any]:
    """Return the content and the weights of a folder, as a checkpoint has them.

    Raises:
        InputError: a file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    content, words = read_json(folder / CONFIG), read_json(folder / VOCABULARY)
    if not isinstance(content, dict) or not isinstance(words, dict) or not isinstance(words.get("words"), list):
        raise InputError(f"{folder}: {CONFIG} or {VOCABULARY} is not what scripts/export.py writes; export it again")
    try:
        weights = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{folder / WEIGHTS}: damaged ({error}); export it again") from error
    state = {f"captioner.{name}": tensor for name, tensor in weights.items()}
    return {"captioning": content | {"vocabulary": words["words"]}, "state_dict": state}
