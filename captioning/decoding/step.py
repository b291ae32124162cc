"""What decoding works with: a step function, the captions it leads to, and the options of a search.

A step function takes ``(tokens (N,), state)`` and returns a ``Step``. The state is a tuple of tensors whose first axis
is N = images * rows, the rows of an image adjacent; between steps it is reordered with ``index_select`` alone. Images
whose captions have all ended leave the batch where the step function can do without them (``ImageStepFunction``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from captioning.errors import InputError, check_range, check_whole
from captioning.trace import AttentionTrace, State


class Step(NamedTuple):
    """One step of N rows: log_probs (N, V) in nats, the new state, and where the step looked, (N, ..)."""

    log_probs: Tensor
    state: State
    trace: AttentionTrace


StepFunction = Callable[[Tensor, State], Step]


@runtime_checkable
class ImageStepFunction(Protocol):
    """A step function over ``images`` images that can go on with some of them alone."""

    images: int

    def __call__(self, tokens: Tensor, state: State) -> Step: ...

    def select(self, images: Tensor) -> ImageStepFunction:
        """Return the step function of the given images, (B',) indices. Called when at most half of them are left."""


@dataclass(frozen=True)
class Hypothesis:
    """One decoded caption.

    Attributes:
        ids: word ids, without <start> and <end>.
        log_probs: nats per word; one more for <end> when the caption is finished.
        score: what hypotheses are ranked by: the sum of ``log_probs``, divided by the length normalisation.
        finished: False when the maximum length cut the caption off.
        trace: of the steps that chose the words, (len(ids), ..); float32 on the CPU.
    """

    ids: list[int]
    log_probs: list[float]
    score: float
    finished: bool
    trace: AttentionTrace


@dataclass(frozen=True)
class BeamOptions:
    """How captions are searched for in evaluation; see ``beam_search``. A beam of 1 is greedy decoding.

    Raises:
        InputError: an option out of its range.
    """

    beam_size: int = 3
    length_normalization: float = 0.0
    max_length: int = 30
    min_length: int = 1

    def __post_init__(self) -> None:
        check_whole(1, 1000, beam_size=self.beam_size, max_length=self.max_length)
        check_whole(0, min_length=self.min_length)
        check_range(-10, 10, length_normalization=self.length_normalization)
        check_lengths(self.min_length, self.max_length)


def check_lengths(min_length: int, max_length: int) -> None:
    """Raises:
    InputError: captions cannot have this many words.
    """
    check_whole(1, max_length=max_length)
    if not 0 <= min_length < max_length:
        raise InputError(f"min_length must be in 0 .. {max_length - 1}, below max_length, got {min_length}")
