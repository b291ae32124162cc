"""Captions word by word: the most probable word, or one drawn from the model's distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from captioning.decoding.beam import beam_search
from captioning.decoding.constraints import Constraints
from captioning.decoding.search import Choices, Search
from captioning.decoding.step import Hypothesis, ImageStepFunction, StepFunction
from captioning.trace import State
from captioning.vocabulary import END, START


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

    Log-probabilities are the model's own, not those of the tempered, cut and masked distribution. A step
    draws one number per row from torch's global generator, also for rows that have ended, so no caption depends on the
    others.

    Args:
        temperature: Positive divisor of the log-probabilities.
        top_k: Number of the most probable words to draw from; None for all.
        top_p: Draw from the smallest set of most probable words whose probability reaches this (nucleus sampling).
        max_length, constraints: As in ``greedy``.

    Raises:
        InputError: No caption of ``max_length`` words meets the constraints.
    """
    constraints.check(max_length)
    N, device = state[0].shape[0], state[0].device
    images = step.images if isinstance(step, ImageStepFunction) else N
    R = N // images
    search = Search(step, images, device, constraints)
    rows = torch.arange(N, device=device)  # those that are still searched
    slots = rows[:R].expand(images, R)
    tokens = torch.full((N,), START, device=device)
    ended = torch.zeros(images, R, dtype=torch.bool, device=device)
    for words in range(max_length):
        out = search.advance(tokens, state)
        state = out.state
        likely = _likely(out.log_probs / temperature, top_k, top_p)
        word = draw_words(likely, torch.rand(N, 1, dtype=torch.float64, device=device)[rows]).view_as(ended)
        log_prob = out.log_probs.gather(1, word.view(-1, 1)).view_as(ended)
        last = words == max_length - 1
        leaves = ~ended if last else (word == END) & ~ended
        search.history.append(Choices(word, log_prob, slots[: len(word)], leaves, out.trace))
        if last:
            break
        ended = ended | leaves
        tokens = word.masked_fill(ended, END).flatten()
        remaining = search.remaining(~ended.all(dim=1))
        if remaining is not None:
            search.keep(remaining)
            if not len(remaining):
                break
            places = (remaining.unsqueeze(1) * R + torch.arange(R, device=device)).flatten()
            state = tuple(tensor.index_select(0, places) for tensor in state)
            tokens, rows, ended = tokens[places], rows[places], ended[remaining]
    return [hypothesis for image in search.results() for hypothesis in image]


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
