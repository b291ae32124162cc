"""Captions word by word: the most probable word, or one drawn from the model's distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from captioning.decoding.beam import beam_search
from captioning.decoding.constraints import Constraints
from captioning.decoding.search import search
from captioning.decoding.step import Hypothesis, StepFunction
from captioning.trace import State


def greedy(
    step: StepFunction,
    state: State,
    *,
    max_length: int = 30,
    constraints: Constraints = Constraints(),  # noqa: B008 - frozen
) -> list[Hypothesis]:
    """Return the caption that takes the most probable word at every step, one per image of ``state``: a beam of one.

    Args:
        max_length: Largest number of steps. A caption that has not ended by then is cut off after this many words.
        constraints: What the words must be.

    Raises:
        InputError: No caption of ``max_length`` words meets the constraints.
    """
    beams = beam_search(step, state, beam_size=1, max_length=max_length, constraints=constraints)
    return [hypothesis for (hypothesis,) in beams]


def sample(
    step: StepFunction,
    state: State,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    max_length: int = 30,
    constraints: Constraints = Constraints(),  # noqa: B008 - frozen
) -> list[Hypothesis]:
    """Return one caption per row of ``state``, each word drawn from the model's distribution.

    Log-probabilities are the model's own, not those of the tempered, cut and masked distribution. A step draws one
    number per row from torch's global generator, also for rows that have ended, so no caption depends on the others.

    Args:
        temperature: Positive divisor of the log-probabilities.
        top_k: Number of the most probable words to draw from; None for all.
        top_p: Draw from the smallest set of most probable words whose probability reaches this (nucleus sampling).
        max_length, constraints: As in ``greedy``.

    Raises:
        InputError: No caption of ``max_length`` words meets the constraints.
    """
    device, B = state[0].device, step.images
    R = len(state[0]) // B

    def choose(log_probs: Tensor, total: Tensor, left: Tensor, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        uniform = torch.rand(B, R, 1, dtype=torch.float64, device=device)[images]
        word = draw_words(_likely(log_probs.flatten(0, 1) / temperature, top_k, top_p), uniform.flatten(0, 1))
        log_prob = log_probs.gather(2, word.view(-1, R, 1)).squeeze(2)
        return total + log_prob, torch.arange(R, device=device).expand_as(total), word.view_as(total), log_prob

    images = search(step, state, choose, slots=R, max_length=max_length, constraints=constraints)
    return [hypothesis for image in images for hypothesis in image]


def _likely(log_probs: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Return log_probs (N, V) with -inf for the words outside of the ``top_k`` and of ``top_p``."""
    if top_k is not None:
        least = log_probs.topk(min(top_k, log_probs.shape[-1]), dim=-1).values[:, -1:]
        log_probs = log_probs.masked_fill(log_probs < least, float("-inf"))
    if top_p is not None:
        ordered, order = log_probs.softmax(dim=-1).sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered  # the word that crosses top_p is still in the set
        outside = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        log_probs = log_probs.masked_fill(outside, float("-inf"))
    return log_probs


def draw_words(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Return one word (N,) drawn from each of N distributions, with log_probs (N, V) that need not be normalised.

    Args:
        uniform: (N, 1) float64, drawn uniformly from [0, 1).
    """
    reached = log_probs.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    return torch.searchsorted(reached, uniform * reached[:, -1:], right=True).squeeze(-1)  # the first that lies beyond
