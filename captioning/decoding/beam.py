"""Beam search."""

from __future__ import annotations

import torch
from torch import Tensor

from captioning.decoding.constraints import Constraints
from captioning.decoding.search import search
from captioning.decoding.step import Hypothesis, StepFunction
from captioning.errors import InputError
from captioning.trace import State


def beam_search(
    step: StepFunction,
    state: State,
    *,
    beam_size: int,
    length_normalization: float = 0.0,
    max_length: int = 30,
    constraints: Constraints = Constraints(),  # noqa: B008 - frozen
) -> list[list[Hypothesis]]:
    """Return up to K captions per image, best first; all images are searched in one batch.

    As in the authors' code, a finished hypothesis leaves the beam and narrows it; the search for an image ends when K
    have finished, or at ``max_length``, where those still alive are returned as unfinished, after the finished ones.

    Args:
        state: State of B rows, one per image; after the first step it has K rows per image.
        beam_size: The width K of the beam.
        length_normalization: The exponent a. Captions are ranked by the log-probability divided by (steps ** a), <end>
            counted as a step: 0 ranks by log-probability, 1 by its mean per step.
        max_length: Largest number of steps. A caption that has not ended by then is cut off after this many words.
        constraints: What the words must be.

    Raises:
        InputError: No caption of ``max_length`` words meets the constraints, or no word has a finite probability.
    """
    slots = torch.arange(beam_size, device=state[0].device)

    def choose(log_probs: Tensor, total: Tensor, left: Tensor, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        total, parent, word, log_prob = _best(log_probs, total, beam_size)
        return total.masked_fill(slots >= left, float("-inf")), parent, word, log_prob

    hypotheses = search(
        step,
        state,
        choose,
        slots=beam_size,
        max_length=max_length,
        constraints=constraints,
        length_normalization=length_normalization,
    )
    if len(hypotheses) < step.images:
        raise InputError("the model gives no word a finite probability; use another checkpoint")
    return [sorted(image, key=lambda caption: (not caption.finished, -caption.log_prob)) for image in hypotheses]


def _best(log_probs: Tensor, total: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the ``size`` best continuations of each image: total, parent, word and log_prob, (B, size) each.

    Args:
        log_probs: (B, rows, V), of the next word of every beam.
        total: (B, rows), the log-probabilities of the beams.
    """
    # The best of each row hold the best of the image.
    log_prob, word = log_probs.topk(min(size, log_probs.shape[2]), dim=2)
    choices = log_prob.shape[2]  # per beam
    candidates, log_prob, word = (log_prob + total.unsqueeze(2)).flatten(1), log_prob.flatten(1), word.flatten(1)
    least = candidates.shape[1]
    if least < size:  # a beam wider than the vocabulary
        candidates = torch.nn.functional.pad(candidates, (0, size - least), value=float("-inf"))
    total, best = candidates.topk(size, dim=1)
    best = best.clamp(max=least - 1)  # changes padding only
    return total, best // choices, word.gather(1, best), log_prob.gather(1, best)
