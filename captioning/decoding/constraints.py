"""Constraints on captions, as masks on the log-probabilities of the next word. Every search applies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from captioning.decoding.step import check_lengths
from captioning.errors import InputError
from captioning.vocabulary import END, PAD, START, UNK

NEVER = (PAD, START, UNK)
"""Ids that no caption has."""


@dataclass(frozen=True)
class Constraints:
    """What the words of a caption must be. Masked words get -inf; the others keep the model's log-probabilities.

    Attributes:
        min_length: Smallest number of words before <end>, those of the prefix included.
        no_repeat_ngram: Length n of the word sequences that may occur only once in a caption, in which no word follows
            itself either; None allows repetition. A caption that no word may continue ends, even before ``min_length``.
        prefix: Ids of the words that every caption begins with. The prefix itself may repeat words.
        repeatable: Ids of the words that a caption may have more than once; None for all.
    """

    min_length: int = 0
    no_repeat_ngram: int | None = None
    prefix: tuple[int, ...] = ()
    repeatable: tuple[int, ...] | None = None

    def check(self, max_length: int) -> None:
        """Raises:
        InputError: Captions of at most ``max_length`` words cannot meet the constraints.
        """
        check_lengths(self.min_length, max_length)
        if len(self.prefix) >= max_length:
            raise InputError(f"prefix: {len(self.prefix)} words leave no room below max_length {max_length}")


class Masks:
    """The masks of constraints on one device."""

    def __init__(self, constraints: Constraints, device: torch.device) -> None:
        self.constraints = constraints
        self._never = torch.tensor(NEVER, device=device)
        self._early = torch.tensor([*NEVER, END], device=device)

    def apply(self, log_probs: Tensor, length: int, words: Callable[[], Tensor]) -> Tensor:
        """Return log_probs (N, V) as float32, -inf for the words that must not come next.

        Args:
            log_probs: (N, V), of the next word of N captions.
            length: Number of words that every caption has.
            words: Returns the ids of these words, (N, length). Called only if a constraint depends on them.
        """
        constraints, log_probs = self.constraints, log_probs.float()
        if length < len(constraints.prefix):
            word = constraints.prefix[length]
            return torch.full_like(log_probs, float("-inf")).index_copy(
                1, torch.tensor([word], device=log_probs.device), log_probs[:, [word]]
            )
        banned = self._early if length < constraints.min_length else self._never
        masked = log_probs.index_fill(1, banned, float("-inf"))
        n, repeatable = constraints.no_repeat_ngram, constraints.repeatable
        if (n is None and repeatable is None) or length == 0:
            return masked
        if n is not None:
            masked = masked.masked_fill(_repeats(words(), n, log_probs.shape[1]), float("-inf"))
        if repeatable is not None:
            said = torch.zeros_like(masked, dtype=torch.bool).scatter_(1, words(), True)
            said[:, list(repeatable)] = False
            masked = masked.masked_fill(said, float("-inf"))
        stuck = ~masked.isfinite().any(dim=1)
        masked[:, END] = torch.where(stuck, log_probs[:, END], masked[:, END])
        return masked


def _repeats(words: Tensor, n: int, vocabulary_size: int) -> Tensor:
    """Return (N, V) bool, whether a word after ``words`` (N, t), t >= 1, would repeat the last one or n in a row."""
    repeated = torch.zeros(len(words), vocabulary_size, device=words.device).scatter_(1, words[:, -1:], 1.0)
    if words.shape[1] >= n:
        ngrams = words.unfold(1, n, 1)  # (N, t - n + 1, n)
        begun = (ngrams[..., :-1] == words[:, None, words.shape[1] - n + 1 :]).all(dim=2)
        repeated.scatter_add_(1, ngrams[..., -1], begun.float())
    return repeated > 0
