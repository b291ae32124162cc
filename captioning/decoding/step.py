"""Step functions and hypotheses.

A step function takes ``(tokens (N,), state)`` and returns a ``Step``. The state is a tuple of tensors whose first axis
has N = images * rows entries, the rows of an image adjacent. Between steps a search only selects rows, with
``index_select``. Images whose captions have all ended leave the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from captioning.trace import AttentionTrace, State


class Step(NamedTuple):
    """One step of N rows: log_probs (N, V) in nats, the new state, and the attention trace, (N, ..)."""

    log_probs: Tensor
    state: State
    trace: AttentionTrace


class StepFunction(Protocol):
    """A step function over ``image_count`` images, which can continue with a selection of them."""

    image_count: int

    def __call__(self, tokens: Tensor, state: State) -> Step: ...

    def select_images(self, images: Tensor) -> StepFunction:
        """Return the step function over the images at indices (B',), with which a search of fewer images continues."""


@dataclass(frozen=True)
class Hypothesis:
    """One decoded caption.

    Attributes:
        ids: Word ids, without <start> and <end>.
        log_probs: Log-probability of every word in nats; one more for <end> if the caption is finished.
        log_prob: The search's criterion: the sum of ``log_probs``, divided by their number ** length_normalization.
        finished: False if the maximum length cut the caption off.
        trace: Trace of the steps that chose the words, (len(ids), ..); float32, on the CPU.
    """

    ids: list[int]
    log_probs: list[float]
    log_prob: float
    finished: bool
    trace: AttentionTrace
