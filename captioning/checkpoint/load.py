"""Models from a checkpoint file, an exported folder or the hub, and training that begins with their weights."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from captioning.checkpoint.export import CONFIG, VOCABULARY, WEIGHTS, is_export, read_export
from captioning.checkpoint.format import read_checkpoint, rebuild
from captioning.errors import InputError, one_line
from captioning.model.captioner import Captioner
from captioning.tokenizers import Tokenizer
from captioning.vocabulary import UNK, Vocabulary

PRETRAINED = "pretrained"
"""The name of the captioner that is installed with the package, an exported folder."""
PRETRAINED_FOLDER = Path(__file__).parent.parent / "pretrained" / "photos_lite2"


class SavedModel(NamedTuple):
    """A model as it was saved."""

    path: str
    captioner: Captioner
    vocabulary: Vocabulary
    settings: dict[str, Any]  # the full training configuration; {} if it was not saved

    def load_into(self, captioner: Captioner, vocabulary: Vocabulary) -> None:
        """Copy these weights into a captioner that is to be trained.

        ``vocabulary`` is the captioner's. It begins with this model's words; the weights of further words begin as
        those of <unk>. Raises InputError if the vocabulary or the model does not fit.
        """
        if vocabulary.words[: len(self.vocabulary.words)] != self.vocabulary.words:
            check_vocabulary(
                f"{self.path}: its", self.vocabulary.words, vocabulary, f", or --data.vocabulary.extend {self.path}"
            )
        weights = dict(self.captioner.state_dict())
        new_words = len(vocabulary) - len(self.vocabulary)
        for name, parameter in captioner.named_parameters(remove_duplicate=False):  # tied weights have two names
            sizes = (len(weights[name]), len(parameter)) if new_words and name in weights else None
            if sizes == (len(self.vocabulary), len(vocabulary)):
                unk_weights = weights[name][UNK]
                weights[name] = torch.cat([weights[name], unk_weights.expand(new_words, *unk_weights.shape)])
        try:
            captioner.load_state_dict(weights)
        except RuntimeError as error:
            reason = one_line(error)
            raise InputError(f"{self.path}: its weights do not fit the model of the config ({reason})") from error


def read_model(path: str | os.PathLike[str] = PRETRAINED, device: str | torch.device = "cpu") -> SavedModel:
    """Return a saved model without running code in its file.

    Args:
        path: A .ckpt file, a folder that `captioning export` wrote, such a folder's name on the Hugging Face hub
            ("hf:owner/name" or "hf:owner/name@revision"), or "pretrained", the captioner installed with the package.
        device: "auto", "cpu", "cuda", "cuda:1" ..

    Raises:
        InputError: The file is missing, damaged, of another project or of a newer version of this one; the device does
            not exist; or the hub has no such captioner or cannot be reached.
    """
    device = usable_device(device)
    path = os.path.expanduser(path)
    source = PRETRAINED_FOLDER if path == PRETRAINED else _download(path) if path.startswith("hf:") else Path(path)
    checkpoint = {} if is_export(source) else read_checkpoint(source)
    try:
        checkpoint = checkpoint or read_export(source)
        captioner, vocabulary = rebuild(checkpoint, device)
        settings = dict(checkpoint["captioning"]["settings"] or {})
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except torch.OutOfMemoryError:  # of the device
        raise
    except Exception as error:  # damaged content raises errors of many types
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(f"{path}: damaged, or does not describe the model of its weights ({reason})") from error
    return SavedModel(str(path), captioner, vocabulary, settings)


def _download(name: str) -> Path:
    """Download "hf:owner/name" or "hf:owner/name@revision" unless the hub's cache has it; return its folder."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise InputError(f"{name}: needs huggingface_hub; pip install -e '.[hub]'") from error
    repository, _, revision = name.removeprefix("hf:").partition("@")
    try:
        files = [CONFIG, VOCABULARY, WEIGHTS]
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=files))
    except Exception as error:  # the HTTP library's errors are among them
        raise InputError(f"{name}: {one_line(error)}") from error


def usable_device(name: str | torch.device) -> torch.device:
    """Return a CPU or CUDA device of this machine (MPS lacks float64, which sampling needs). Raises InputError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    usable = ["cpu", *gpus]
    if str(name) not in (*usable, "cpu:0") and not (gpus and str(name) == "cuda"):
        raise InputError(f"device {name}: torch finds no such device here; use {' or '.join(usable)}")
    return torch.device(name)


def check_tokenizer(checkpoint_tokenizer: Tokenizer, data_tokenizer: Tokenizer) -> None:
    """Raise InputError if the data's tokenizer differs from the checkpoint's."""
    if checkpoint_tokenizer != data_tokenizer:
        name = type(checkpoint_tokenizer).__name__
        problem = f"{type(data_tokenizer).__name__}, the checkpoint's words are those of {name}; set {name}"
        raise InputError(f"data.vocabulary.tokenizer: {problem}")


def check_vocabulary(subject: str, words: Sequence[str], vocabulary: Vocabulary, remedy: str = "") -> None:
    """Raise InputError, which begins with ``subject`` and ends in ``remedy``, if the data has another vocabulary."""
    if tuple(words) != vocabulary.words:
        problem = f"vocabulary ({len(words)} words) is not the data's ({len(vocabulary.words)})"
        if set(words) == set(vocabulary.words):
            problem = "vocabulary has the data's words in another order"
        raise InputError(f"{subject} {problem}; use the data settings the checkpoint was trained with{remedy}")
