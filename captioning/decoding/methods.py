"""The one place where options choose between beam search, greedy decoding and sampling."""

from __future__ import annotations

from typing import Any

from captioning.decoding.beam import beam_search
from captioning.decoding.options import BeamOptions, DecodingOptions
from captioning.decoding.sampling import greedy, sample
from captioning.decoding.step import Hypothesis, StepFunction
from captioning.trace import State
from captioning.vocabulary import Vocabulary


def decode(
    step: StepFunction, state: State, options: BeamOptions, vocabulary: Vocabulary | None = None
) -> list[list[Hypothesis]]:
    """Return the captions of every image of ``state``, (B, ..) each: best first, or in the order of drawing.

    Args:
        vocabulary: The model's, which ``prefix`` and ``no_repeat_content`` need.

    Raises:
        InputError: No caption meets the constraints, or the model does not know a word of the prefix.
    """
    if not isinstance(options, DecodingOptions):
        options = DecodingOptions(**vars(options))
    limits: dict[str, Any] = {"max_length": options.max_length, "constraints": options.constraints(vocabulary)}
    if options.method == "greedy":
        return [[hypothesis] for hypothesis in greedy(step, state, **limits)]
    S = options.samples or 1
    if options.method == "beam":
        width, exponent = max(options.beam_size, S), options.length_normalization
        beams = beam_search(step, state, beam_size=width, length_normalization=exponent, **limits)
        return [beam[: options.samples] for beam in beams]
    states = tuple(tensor.repeat_interleave(S, dim=0) for tensor in state)
    drawn = sample(step, states, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, **limits)
    return [drawn[first : first + S] for first in range(0, len(drawn), S)]
