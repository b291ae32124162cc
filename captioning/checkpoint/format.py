"""Checkpoint files, and their description of the model: plain data that rebuild encoder, decoder and vocabulary.

Reading a file runs none of its code.
"""

import dataclasses
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from captioning import earlier_names
from captioning.cells import CellGrid
from captioning.component import public_path
from captioning.data.transforms import Preprocessing
from captioning.encoders import Encoder
from captioning.errors import InputError, one_line
from captioning.files import replacing
from captioning.model.captioner import Captioner
from captioning.model.decoder import Decoder
from captioning.run_folder import RunFolder
from captioning.vocabulary import Vocabulary, tokenizer_from

CHECKPOINT_FORMAT = 1
"""Increased when older versions cannot read a checkpoint's ``["captioning"]`` entry any more."""


def checkpoint_entry(captioner: Captioner, vocabulary: Vocabulary, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's ``["captioning"]`` entry; ``settings`` are the full training configuration."""
    cells = captioner.encoder.known_cells
    return {
        "format": CHECKPOINT_FORMAT,
        "encoder": captioner.encoder.to_config(),
        "decoder": captioner.decoder.to_config(),
        "preprocessing": dataclasses.asdict(captioner.encoder.preprocessing),
        "vocabulary": list(vocabulary.words),
        "tokenizer": {"class_path": public_path(type(vocabulary.tokenizer)), "init_args": {}},
        "settings": dict(settings),
        **({} if cells is None else {"cells": dataclasses.asdict(cells)}),
    }


def rebuild(checkpoint: Mapping[str, Any], device: torch.device) -> tuple[Captioner, Vocabulary]:
    """Return the captioner and the vocabulary of a checkpoint from ``read_checkpoint`` or ``read_export``.

    Constructs known classes only, and neither reads nor writes a file that the description names. Raises InputError if
    the format is a newer version's, a class is unknown, or the weights are not finite, and any other exception if the
    content is damaged.
    """
    content, state = checkpoint["captioning"], checkpoint["state_dict"]
    if content["format"] > CHECKPOINT_FORMAT:
        formats = f"{content['format']}, this version reads up to {CHECKPOINT_FORMAT}"
        raise InputError(f"has checkpoint format {formats}; update captioning")
    vocabulary = Vocabulary(content["vocabulary"], tokenizer_from(content["tokenizer"]))
    encoder: Encoder = Encoder.from_config(content["encoder"])
    encoder.preprocessing = Preprocessing(**content["preprocessing"])
    decoder: Decoder = Decoder.from_config(without_arguments(content["decoder"], earlier_names.is_schedule_in_batches))
    captioner = Captioner(encoder, decoder, vocabulary_size=len(vocabulary))
    prefix = "captioner."
    weights = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    captioner.load_state_dict(weights)
    if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
        raise InputError("its weights are not finite: training had diverged; use an earlier checkpoint")
    captioner.to(device)
    if cells := content.get("cells"):  # after the move: an encoder takes moved weights for changed ones
        captioner.encoder.cells = CellGrid(**{name: tuple(pair) for name, pair in cells.items()})
    return captioner, vocabulary


def without_arguments(config: Any, drop: Callable[[str, Any], bool]) -> Any:
    """Return a model's description without the arguments for which ``drop(name, value)`` is true."""
    if not isinstance(config, dict):
        return config
    return {name: without_arguments(value, drop) for name, value in config.items() if not drop(name, value)}


def write_checkpoint(checkpoint: Mapping[str, Any], path: Path, option: str = "") -> None:
    """Write a checkpoint whole or not at all. Raises InputError, which names ``option``, if that fails."""
    content = io.BytesIO()  # torch.save's own message about a full disk does not mention the disk
    torch.save(checkpoint, content)
    with replacing(path, option) as temporary:
        temporary.write_bytes(content.getbuffer())


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what `captioning fit` saved, with tensors on the CPU, without running code in the file.

    Tensors are read on first use, so that the optimizer's state, two thirds of the file, stays on the disk. Raises
    InputError if the file is missing, damaged, or another project's.
    """
    if path.is_dir() or str(path) == "pretrained" or str(path).startswith("hf:"):
        best = RunFolder(path).checkpoint("best")
        no_best = "a .ckpt file (caption, test and fit --init_from take exported folders, too)"
        raise InputError(f"{path}: is a folder; give {best if best.is_file() else no_best}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        objects = "it holds objects beside weights and plain data (opening it could run code), or is damaged"
        raise InputError(f"{path}: not a checkpoint of this project: {objects}") from error
    except (FileNotFoundError, PermissionError) as error:
        raise InputError(f"{path}: the checkpoint cannot be read ({error.strerror})") from error
    except Exception as error:  # a damaged file makes PyTorch raise errors of many types
        raise InputError(
            f"{path}: damaged, or not a checkpoint ({one_line(error, 120)}); give a .ckpt file, or copy it again"
        ) from error
    if not isinstance(checkpoint, dict) or not {"captioning", "state_dict"} <= checkpoint.keys():
        raise InputError(f"{path}: not a checkpoint of this project; give one that `captioning fit` wrote")
    return checkpoint
