"""Constraints on captions, as masks on the log-probabilities of the next word. Every search applies them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from captioning.decoding_options import DecodingOptions
from captioning.errors import InputError
from captioning.vocabulary import END, FUNCTION_WORDS, PAD, START, UNK, Vocabulary

FORBIDDEN_IDS = (PAD, START, UNK)  # ids that no caption has


@dataclass(frozen=True)
class Constraints:
    """Which words a caption may have. Masked words get -inf; the others keep the model's log-probabilities.

    Attributes:
        min_length: Fewest words before <end>, prefix included; a caption that no word may continue ends early.
        no_repeat_ngram: Length n: no sequence of n words occurs twice, and no word twice in a row. None allows both.
        prefix: Ids of the words that every caption begins with. The prefix itself may repeat words.
        repeatable: Ids of the words that a caption may have more than once; None for all.
    """

    min_length: int = 0
    no_repeat_ngram: int | None = None
    prefix: tuple[int, ...] = ()
    repeatable: tuple[int, ...] | None = None

    @classmethod
    def from_options(cls, options: DecodingOptions, vocabulary: Vocabulary | None) -> Constraints:
        """Return the constraints of options. Raises InputError if they need a missing vocabulary or an unknown word."""
        constraints = cls(min_length=options.min_length, no_repeat_ngram=options.no_repeat_ngram or None)
        if not (options.prefix or options.no_repeat_content):
            return constraints
        if vocabulary is None:
            raise InputError(f"{'prefix' if options.prefix else 'no_repeat_content'} needs the model's vocabulary")
        words = vocabulary.tokenizer.tokenize(options.prefix or "")
        if unknown := next((word for word in words if word not in vocabulary), None):
            size = f"it knows {len(vocabulary.words):,} words"
            raise InputError(f"prefix {options.prefix!r}: the model does not know {unknown!r}; {size}")
        function_words = tuple(vocabulary.encode(word for word in FUNCTION_WORDS if word in vocabulary))
        repeatable = function_words if options.no_repeat_content else None
        return replace(constraints, prefix=tuple(vocabulary.encode(words)), repeatable=repeatable)

    def check(self, max_length: int) -> None:
        """Raise InputError if the prefix leaves no room for a word in captions of at most ``max_length`` words."""
        if len(self.prefix) >= max_length:
            raise InputError(f"prefix: {len(self.prefix)} words leave no room below max_length {max_length}")

    def mask(self, log_probs: Tensor, words: Tensor) -> Tensor:
        """Return log_probs (N, V) after ``words`` (N, t) as float32, with -inf for the words that may not follow."""
        log_probs, length = log_probs.float(), words.shape[1]
        if length < len(self.prefix):
            word = torch.tensor([self.prefix[length]], device=words.device)
            return torch.full_like(log_probs, float("-inf")).index_copy(1, word, log_probs[:, word])
        forbidden = (*FORBIDDEN_IDS, END) if length < self.min_length else FORBIDDEN_IDS
        masked = log_probs.index_fill(1, torch.tensor(forbidden, device=words.device), float("-inf"))
        if (self.no_repeat_ngram is None and self.repeatable is None) or length == 0:
            return masked
        if self.no_repeat_ngram is not None:
            masked = masked.masked_fill(_repeats(words, self.no_repeat_ngram, log_probs.shape[1]), float("-inf"))
        if self.repeatable is not None:
            is_repeat = torch.zeros_like(masked, dtype=torch.bool).scatter_(1, words, True)  # (N, V)
            is_repeat[:, list(self.repeatable)] = False
            masked = masked.masked_fill(is_repeat, float("-inf"))
        is_stuck = ~masked.isfinite().any(dim=1)
        masked[:, END] = torch.where(is_stuck, log_probs[:, END], masked[:, END])
        return masked


def _repeats(words: Tensor, n: int, vocabulary_size: int) -> Tensor:
    """Return (N, V) bool, whether a word after ``words`` (N, t), t >= 1, would repeat the last word or an n-gram."""
    repeat_count = torch.zeros(len(words), vocabulary_size, device=words.device).scatter_(1, words[:, -1:], 1.0)
    if words.shape[1] >= n:
        ngrams = words.unfold(1, n, 1)  # (N, t - n + 1, n)
        has_begun = (ngrams[..., :-1] == words[:, None, words.shape[1] - n + 1 :]).all(dim=2)
        repeat_count.scatter_add_(1, ngrams[..., -1], has_begun.float())
    return repeat_count > 0
