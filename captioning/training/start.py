"""A run that begins with the weights of another run's checkpoint; and the words that such weights belong to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from captioning.captioner import load
from captioning.errors import InputError, one_line
from captioning.model.captioner import Captioner
from captioning.tokenizers import Tokenizer
from captioning.vocabulary import Vocabulary


class Start(NamedTuple):
    """The captioner's weights in a checkpoint, and the vocabulary that they are of."""

    path: str
    weights: dict[str, Tensor]
    vocabulary: Vocabulary

    @classmethod
    def read(cls, path: str | Path) -> Start:
        """Raises:
        InputError: it is no checkpoint of this project, or damaged. No code in it is run.
        """
        found = load(path)
        return cls(str(path), found.captioner.state_dict(), found.vocabulary)

    def load_into(self, captioner: Captioner, vocabulary: Vocabulary) -> None:
        """Give a captioner these weights; it counts its training batches from 0.

        Raises:
            InputError: the weights are of another vocabulary or of another model.
        """
        check_vocabulary(f"{self.path}: its", self.vocabulary.words, vocabulary)
        weights = {name: tensor for name, tensor in self.weights.items() if not _counts(name)}
        counters = {name: tensor for name, tensor in captioner.state_dict().items() if _counts(name)}
        try:
            captioner.load_state_dict(weights | counters)
        except RuntimeError as error:
            reason = one_line(error)
            raise InputError(f"{self.path}: its weights do not fit the model of the config ({reason})") from error


def _counts(name: str) -> bool:
    """Whether this is hard attention's number of training batches, by which it draws."""
    return name.rpartition(".")[2] == "batches"


def check_tokenizer(checkpoint: Tokenizer, data: Tokenizer) -> None:
    """Raises:
    InputError: the words of a checkpoint come from another tokenizer than those of the data.
    """
    if checkpoint != data:
        there, here = type(checkpoint).__name__, type(data).__name__
        raise InputError(f"data.vocabulary.tokenizer: {here}, the checkpoint's words are those of {there}; set {there}")


def check_vocabulary(whose: str, words: Sequence[str], vocabulary: Vocabulary) -> None:
    """Raises:
    InputError: ``words`` of a checkpoint are not those of the data.
    """
    if tuple(words) != vocabulary.words:
        raise InputError(
            f"{whose} vocabulary ({len(words)} words) is not the data's ({len(vocabulary.words)}): "
            f"{vocabulary.difference(words)}; use the data settings the checkpoint was trained with"
        )
