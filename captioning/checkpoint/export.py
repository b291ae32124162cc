"""A captioner as a folder that can be passed on: safetensors, JSON and a model card. Nothing in it runs.

``model.safetensors`` has the weights without the optimizer's state, ``config.json`` everything that rebuilds the model
and prepares images, ``vocabulary.json`` the words, and ``README.md`` is the model card.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from captioning.checkpoint.format import describe
from captioning.errors import InputError
from captioning.files import read_json, replacing, write_json, write_text
from captioning.model.captioner import Captioner
from captioning.vocabulary import Vocabulary

WEIGHTS, CONFIG, VOCABULARY, CARD = "model.safetensors", "config.json", "vocabulary.json", "README.md"


def is_export(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def refuse_other_folder(folder: Path) -> None:
    """Refuse to write over the README of something else.

    Raises:
        InputError: The folder has a README, but is not an export.
    """
    is_ours = is_export(folder) and (folder / VOCABULARY).is_file()  # which folders of other models lack
    if (folder / CARD).exists() and not is_ours:
        raise InputError(f"--output {folder}: has a {CARD} of something else; give a folder of its own")


def write_export(
    folder: Path, captioner: Captioner, vocabulary: Vocabulary, settings: Mapping[str, Any], card: str
) -> None:
    """Write a folder that ``read_export`` reads.

    Args:
        folder: The folder, which need not exist.
        captioner: The model.
        vocabulary: The words that the model knows.
        settings: The full configuration that the model was trained with.
        card: The model card, in Markdown.

    Raises:
        InputError: The folder cannot be written, or has the README of something else.
    """
    from safetensors.torch import save

    refuse_other_folder(folder)
    with replacing(folder / WEIGHTS, "--output") as part:
        # Tied embeddings are one tensor with two names. The format takes no tensor twice, so each name gets a copy.
        weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in captioner.state_dict().items()}
        part.write_bytes(save(weights, metadata={"format": "pt"}))  # save_file makes a file that only its owner reads
    config = describe(captioner, vocabulary, settings)
    write_json(folder / VOCABULARY, {"words": config.pop("vocabulary")}, indent=0)
    write_json(folder / CONFIG, config)
    write_text(folder / CARD, card)


def read_export(folder: Path) -> dict[str, Any]:
    """Return the content and the weights of a folder, arranged as in a checkpoint.

    Raises:
        InputError: A file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config, words = read_json(folder / CONFIG), read_json(folder / VOCABULARY)
    if not isinstance(config, dict) or not isinstance(words, dict) or not isinstance(words.get("words"), list):
        raise InputError(f"{folder}: {CONFIG} or {VOCABULARY} is not what captioning export writes; export it again")
    try:
        weights = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{folder / WEIGHTS}: damaged ({error}); export it again") from error
    state = {f"captioner.{name}": tensor for name, tensor in weights.items()}
    return {"captioning": config | {"vocabulary": words["words"]}, "state_dict": state}
