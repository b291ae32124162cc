"""Step functions, hypotheses, and the options of a search.

A step function takes ``(tokens (N,), state)`` and returns a ``Step``. The state is a tuple of tensors whose first axis
is N = images * rows, the rows of an image adjacent; between steps it is only reordered, with ``index_select``. Images
whose captions have all ended leave the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from captioning.errors import InputError, check_range, check_whole
from captioning.trace import AttentionTrace, State
from captioning.vocabulary import FUNCTION_WORDS, Vocabulary


class Step(NamedTuple):
    """One step of N rows: log_probs (N, V) in nats, the new state, and the attention trace, (N, ..)."""

    log_probs: Tensor
    state: State
    trace: AttentionTrace


class StepFunction(Protocol):
    """A step function over ``images`` images, which can continue with a selection of them."""

    images: int

    def __call__(self, tokens: Tensor, state: State) -> Step: ...

    def select(self, images: Tensor) -> StepFunction:
        """Return the step function of the given images, (B',) indices. Called when at most half are left."""


@dataclass(frozen=True)
class Hypothesis:
    """One decoded caption.

    Attributes:
        ids: Word ids, without <start> and <end>.
        log_probs: Log-probability of every word in nats; one more for <end> if the caption is finished.
        log_prob: The sum of ``log_probs`` divided by the length normalisation; hypotheses are ranked by it.
        finished: False if the maximum length cut the caption off.
        trace: Trace of the steps that chose the words, (len(ids), ..); float32, on the CPU.
    """

    ids: list[int]
    log_probs: list[float]
    log_prob: float
    finished: bool
    trace: AttentionTrace


@dataclass(frozen=True)
class BeamOptions:
    """Options of the search in evaluation (see ``beam_search`` and ``Constraints``); a beam of 1 is greedy decoding.

    With ``no_repeat_content`` a caption has every word at most once, except those of ``vocabulary.FUNCTION_WORDS``. An
    InputError names an option that is out of its range.
    """

    beam_size: int = 3
    length_normalization: float = 0.0
    max_length: int = 30
    min_length: int = 1
    no_repeat_ngram: int | None = None
    no_repeat_content: bool = False

    def __post_init__(self) -> None:
        check_whole(1, 1000, beam_size=self.beam_size, max_length=self.max_length)
        check_whole(0, min_length=self.min_length)
        check_whole(1, no_repeat_ngram=self.no_repeat_ngram)
        check_range(-10, 10, length_normalization=self.length_normalization)
        check_lengths(self.min_length, self.max_length)

    def repeatable(self, vocabulary: Vocabulary | None) -> tuple[int, ...] | None:
        """Return the ids of the words that a caption may have more than once; None for all."""
        if not self.no_repeat_content or vocabulary is None:
            return None
        return tuple(vocabulary.encode(word for word in FUNCTION_WORDS if word in vocabulary))

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> BeamOptions:
        """Return the options of the validations in the configuration of a training; defaults where it has none."""
        search = (settings.get("model") or {}).get("search") or {}
        names = [field.name for field in dataclasses.fields(BeamOptions)]
        return BeamOptions(**{name: search[name] for name in names if search.get(name) is not None})


def check_lengths(min_length: int, max_length: int) -> None:
    """Raises:
    InputError: Captions cannot have this many words.
    """
    check_whole(1, max_length=max_length)
    if not 0 <= min_length <= max_length:
        raise InputError(f"min_length must be in 0 .. {max_length}, at most max_length, got {min_length}")
