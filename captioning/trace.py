"""Where the decoder looked: one type from a decoding step to the picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

EXPECTATION = -1
"""In place of a location: the context is the expectation over all of them."""


class AttentionTrace(NamedTuple):
    """What steps looked at: tensors while captions are decoded, arrays in a finished caption.

    The leading axes are those of the steps: (N,) for one step, (N, T) for N captions, (T,) for a caption.

    Attributes:
        alphas: (.., L), the probabilities of the locations.
        betas: (..), the gate in [0, 1]; None if the decoder has no gate.
        locations: (..) integers, the location that the context was taken from, ``EXPECTATION`` where it is the
            expectation over the alphas.
        posterior: (.., L), the probabilities of the locations once the word is known, given that the step looked at
            all. None where words do not come from single locations, and while captions are searched for.
        heads: (.., h, L), as alphas, which are their mean; None in training, and where attention has no heads.
    """

    alphas: Any
    betas: Any
    locations: Any
    posterior: Any = None
    heads: Any = None

    def map(self, function: Callable[[Any], Any]) -> AttentionTrace:
        """Return the trace with ``function`` applied to its parts."""
        return AttentionTrace(*(None if part is None else function(part) for part in self))

    def chosen(self) -> list[int | None]:
        """Return the location of every step of a caption (T,), None where the context is the expectation."""
        return [None if location == EXPECTATION else location for location in self.locations.tolist()]
