"""Models from a checkpoint file, an exported folder or the hub, and training that begins with their weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from captioning.cells import CellGrid
from captioning.checkpoint.export import is_export, read_export
from captioning.checkpoint.format import check_format, rebuild
from captioning.checkpoint.hub import download, is_on_hub
from captioning.checkpoint.io import read_checkpoint
from captioning.checkpoint.pretrained import FOLDER, PRETRAINED
from captioning.errors import InputError, is_out_of_memory, one_line
from captioning.model.captioner import Captioner
from captioning.tokenizers import Tokenizer
from captioning.vocabulary import UNK, Vocabulary


class SavedModel(NamedTuple):
    """A model as it was saved.

    Attributes:
        path: Where it was read from.
        captioner: Encoder and decoder with their weights.
        vocabulary: The words that the model knows.
        settings: The full configuration that the model was trained with; {} if that was not saved.
    """

    path: str
    captioner: Captioner
    vocabulary: Vocabulary
    settings: dict[str, Any]

    def load_into(self, captioner: Captioner, vocabulary: Vocabulary) -> None:
        """Copy these weights into a captioner that is to be trained; its training batches count from 0.

        Args:
            captioner: The captioner to be trained.
            vocabulary: Its vocabulary: this model's words, and possibly further ones. A further word begins with the
                weights of <unk>, which is what this model calls it.

        Raises:
            InputError: The weights belong to another vocabulary or to another model.
        """
        if vocabulary.words[: len(self.vocabulary.words)] != self.vocabulary.words:
            check_vocabulary(f"{self.path}: its", self.vocabulary.words, vocabulary, ", or data.vocabulary.extend")
        further = len(vocabulary) - len(self.vocabulary)
        weights = {name: tensor for name, tensor in self.captioner.state_dict().items() if not _is_counter(name)}
        counters = {name: tensor for name, tensor in captioner.state_dict().items() if _is_counter(name)}
        for name, parameter in captioner.named_parameters(remove_duplicate=False):  # tied weights have two names
            sizes = (len(weights[name]), len(parameter)) if further and name in weights else None
            if sizes == (len(self.vocabulary), len(vocabulary)):
                unknown = weights[name][UNK]
                weights[name] = torch.cat([weights[name], unknown.expand(further, *unknown.shape)])
        try:
            captioner.load_state_dict(weights | counters)
        except RuntimeError as error:
            reason = one_line(error)
            raise InputError(f"{self.path}: its weights do not fit the model of the config ({reason})") from error


def read_model(path: str | os.PathLike[str] = PRETRAINED, device: str | torch.device = "cpu") -> SavedModel:
    """Return the model that a training run saved. The file alone is enough, and no code in it is run.

    Args:
        path: A .ckpt file of this project, a folder that `captioning export` wrote, the name of such a folder on the
            Hugging Face hub, "hf:owner/name" or "hf:owner/name@revision", or "pretrained", the captioner that is
            installed with the package.
        device: Where the model goes: "cpu", "cuda", "cuda:1" ...

    Raises:
        InputError: The file is missing, damaged, of another project or of a newer version of this one; the device does
            not exist; or the hub has no such captioner or cannot be reached.
    """
    target = check_device(device)
    place = FOLDER if path == PRETRAINED else download(str(path)) if is_on_hub(path) else Path(path)
    if path == PRETRAINED and not is_export(place):
        raise InputError(f"this installation has no pretrained captioner ({place} is missing); name a model")
    checkpoint = read_export(place) if is_export(place) else read_checkpoint(place)
    content = checkpoint["captioning"]
    check_format(Path(path), content)
    try:
        captioner, vocabulary = rebuild(content, checkpoint["state_dict"])
        settings = dict(content["settings"] or {})
        if "cells" in content:
            captioner.encoder.cells = CellGrid.from_dict(content["cells"])
        captioner.to(target)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except Exception as error:  # of any kind, where the content is damaged
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"{path}: does not describe a model, or not that of its weights ({type(error).__name__}: {one_line(error)})"
        ) from error
    return SavedModel(str(path), captioner, vocabulary, settings)


def check_device(device: str | torch.device) -> torch.device:
    """Return a device that exists.

    Raises:
        InputError: The device does not exist, or cannot caption.
    """
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device {device!r} is not known; use cpu or cuda") from error
    # Apple's mps has no float64, in which words are drawn.
    if target.type != "cpu" and (target.type != "cuda" or (target.index or 0) >= torch.cuda.device_count()):
        raise InputError(f"device {device}: torch finds {torch.cuda.device_count()} CUDA devices; use cpu or cuda")
    return target


def check_tokenizer(checkpoint: Tokenizer, data: Tokenizer) -> None:
    """Refuse data that are tokenised otherwise than the checkpoint's words.

    Raises:
        InputError: The two tokenizers differ.
    """
    if checkpoint != data:
        there, here = type(checkpoint).__name__, type(data).__name__
        raise InputError(f"data.vocabulary.tokenizer: {here}, the checkpoint's words are those of {there}; set {there}")


def check_vocabulary(whose: str, words: Sequence[str], vocabulary: Vocabulary, remedy: str = "") -> None:
    """Refuse data that have other words than a checkpoint.

    Args:
        whose: The beginning of the message, such as "the checkpoint's".
        words: The words of the checkpoint.
        vocabulary: The vocabulary of the data.
        remedy: What else than the checkpoint's data settings would help.

    Raises:
        InputError: The words differ.
    """
    if tuple(words) != vocabulary.words:
        raise InputError(
            f"{whose} vocabulary ({len(words)} words) is not the data's ({len(vocabulary.words)}): "
            f"{vocabulary.difference(words)}; use the data settings the checkpoint was trained with{remedy}"
        )


def _is_counter(name: str) -> bool:
    """Return whether a buffer is hard attention's number of training batches, which its schedules depend on."""
    return name.rpartition(".")[2] == "batches"
