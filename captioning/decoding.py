"""Captions from a step function: greedy, sampling, beam search. Nothing here knows a model.

A step function takes ``(tokens (N,), state)`` and returns a ``Step``. The state is a tuple of tensors whose first axis
is N = images * rows, the rows of an image adjacent; between steps it is reordered with ``index_select`` alone. Images
whose captions have all ended leave the batch where the step function can do without them (``ImageStepFunction``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from captioning.errors import InputError
from captioning.search import Beams, Ended, Hypothesis, ImageStepFunction, Search, State, Step, StepFunction
from captioning.vocabulary import END, PAD, START, UNK

__all__ = [
    "BeamOptions",
    "Hypothesis",
    "ImageStepFunction",
    "State",
    "Step",
    "StepFunction",
    "beam_search",
    "greedy",
    "sample",
]


@dataclass(frozen=True)
class BeamOptions:
    """How captions are searched for in evaluation; see ``beam_search``. A beam of 1 is greedy decoding."""

    beam_size: int = 3
    length_normalization: float = 0.0
    max_length: int = 30
    min_length: int = 1


class _Rules(NamedTuple):
    """Words that must not be produced: <pad>, <start> and <unk>, and <end> before ``min_length`` words."""

    always: Tensor
    at_first: Tensor
    min_length: int

    @classmethod
    def on(cls, device: torch.device, min_length: int) -> _Rules:
        return cls(
            torch.tensor([PAD, START, UNK], device=device),
            torch.tensor([PAD, START, UNK, END], device=device),
            min_length,
        )

    def apply(self, log_probs: Tensor, words: int) -> Tensor:
        """Return log_probs (N, V) as float32, -inf for what must not come after ``words`` words."""
        banned = self.at_first if words < self.min_length else self.always
        return log_probs.float().index_fill(-1, banned, float("-inf"))


def _check_lengths(min_length: int, max_length: int) -> None:
    if not 0 <= min_length < max_length:
        raise InputError(f"decoding: need 0 <= min_length < max_length, got {min_length} and {max_length}")


def greedy(step: StepFunction, state: State, *, max_length: int = 30, min_length: int = 0) -> list[Hypothesis]:
    """Return the caption that takes the most probable word at every step, one per row of ``state``.

    Args:
        max_length: steps. A caption that has not ended by then is cut off after this many words.
        min_length: words before <end> may come.
    """
    return _roll_out(step, state, lambda log_probs, rows: log_probs.argmax(dim=-1), max_length, min_length)


def sample(
    step: StepFunction,
    state: State,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    max_length: int = 30,
    min_length: int = 0,
) -> list[Hypothesis]:
    """Return one caption per row of ``state``, each word drawn from the model's distribution.

    Scores and log-probabilities are the model's own, not those of the tempered and cut distribution. A step draws one
    number per row from torch's global generator, also for rows that have ended, so no caption depends on the others.

    Args:
        temperature: log-probabilities are divided by it; must be positive.
        top_k: draw from the k most probable words alone.
        top_p: draw from the smallest set of most probable words whose probability reaches this (nucleus sampling).

    Raises:
        InputError: an option out of its range.
    """
    if temperature <= 0:
        raise InputError(f"temperature must be positive, got {temperature}; use greedy decoding for the limit 0")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"top_p must be in (0, 1], got {top_p}")

    N = state[0].shape[0]

    def draw(log_probs: Tensor, rows: Tensor) -> Tensor:
        log_probs = log_probs / temperature
        if top_k is not None:
            least = log_probs.topk(min(top_k, log_probs.shape[-1]), dim=-1).values[:, -1:]
            log_probs = log_probs.masked_fill(log_probs < least, float("-inf"))
        if top_p is not None:
            ordered, order = log_probs.softmax(dim=-1).sort(dim=-1, descending=True)
            before = ordered.cumsum(dim=-1) - ordered  # the word that crosses top_p is still in the set
            outside = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
            log_probs = log_probs.masked_fill(outside, float("-inf"))
        reached = log_probs.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)  # (N', V)
        below = torch.rand(N, 1, dtype=torch.float64, device=rows.device)[rows] * reached[:, -1:]
        return torch.searchsorted(reached, below, right=True).squeeze(-1)  # the first word to lie beyond

    return _roll_out(step, state, draw, max_length, min_length)


def _rows(images: Tensor, rows: int) -> Tensor:
    """Return the rows (B * rows,) of some images, each of which has ``rows`` of them."""
    return (images.unsqueeze(1) * rows + torch.arange(rows, device=images.device)).flatten()


def _roll_out(
    step: StepFunction, state: State, choose: Callable[[Tensor, Tensor], Tensor], max_length: int, min_length: int
) -> list[Hypothesis]:
    """Follow every row with the word that ``choose(log_probs (N', V), rows (N',))`` names, rows of the N at first."""
    _check_lengths(min_length, max_length)
    N, device = state[0].shape[0], state[0].device
    images = step.images if isinstance(step, ImageStepFunction) else N
    R = N // images
    rules, search = _Rules.on(device, min_length), Search(step, images, device)
    rows = torch.arange(N, device=device)
    slots = rows[:R].expand(images, R)
    tokens = torch.full((N,), START, device=device)
    ended = Ended(
        score=torch.zeros(images, R, device=device),
        step=torch.full_like(slots, max_length - 1),
        slot=slots,
        finished=torch.zeros_like(slots, dtype=torch.bool),
    )
    for words in range(max_length):
        out = search.step(tokens, state)
        state = out.state
        log_probs = rules.apply(out.log_probs, words)
        tokens = choose(log_probs, rows).masked_fill(ended.finished.flatten(), END)
        chosen = log_probs.gather(-1, tokens.unsqueeze(-1)).view_as(ended.score)
        word = tokens.view_as(ended.slot)
        search.history.append(Beams.of(out, word, chosen, ended.slot))
        ends = (word == END) & ~ended.finished
        ended = Ended(
            score=ended.score + chosen.masked_fill(ended.finished, 0.0),
            step=ended.step.masked_fill(ends, words),
            slot=ended.slot,
            finished=ended.finished | ends,
        )
        remaining = search.remaining(~ended.finished.all(dim=1)) if words < max_length - 1 else None
        if remaining is not None:
            ended = search.keep(remaining, ended)
            if not len(remaining):
                break
            places = _rows(remaining, R)
            state = tuple(part.index_select(0, places) for part in state)
            tokens, rows = tokens[places], rows[places]
    return [hypothesis for image in search.results(ended) for hypothesis in image]


def beam_search(
    step: StepFunction,
    state: State,
    *,
    beam_size: int,
    length_normalization: float = 0.0,
    max_length: int = 30,
    min_length: int = 0,
) -> list[list[Hypothesis]]:
    """Return up to K captions per image, best first; all images are searched in one batch.

    As in the authors' code, a finished hypothesis leaves the beam and narrows it; the search for an image ends when K
    have finished, or at ``max_length``, where those still alive are returned as unfinished, after the finished ones.

    Args:
        state: of B rows, one per image; after the first step it has K rows per image.
        beam_size: K.
        length_normalization: a; the score is the log-probability divided by (steps ** a), <end> counted as a step.
            0 ranks by log-probability, 1 by its mean per step.
        max_length: steps. A caption that has not ended by then is cut off after this many words.
        min_length: words before <end> may come.

    Raises:
        InputError: an option out of its range.
    """
    _check_lengths(min_length, max_length)
    if beam_size < 1:
        raise InputError(f"beam_size must be at least 1, got {beam_size}")
    B, K, device = state[0].shape[0], beam_size, state[0].device
    rules, search = _Rules.on(device, min_length), Search(step, B, device)
    slots = torch.arange(K, device=device)
    ended = Ended.none(torch.empty(B, K, device=device))
    count = torch.zeros(B, dtype=torch.int64, device=device)  # hypotheses that have left, per image
    total = torch.zeros(B, 1, device=device)  # log-probability of the live beams, -inf for dead ones
    tokens = torch.full((B,), START, device=device)
    for words in range(max_length):
        out = search.step(tokens, state)
        B, width = total.shape
        log_probs = rules.apply(out.log_probs, words)  # (B * width, V)
        # The K best of each row hold the K best of the image.
        log_prob, word = log_probs.topk(min(K, log_probs.shape[1]), dim=1)
        log_prob, word = log_prob.view(B, -1), word.view(B, -1)  # (B, width * K)
        candidates = log_prob.view(B, width, -1) + total.unsqueeze(-1)
        each = candidates.shape[2]
        candidates = candidates.flatten(1)
        if candidates.shape[1] < K:  # a beam wider than the vocabulary
            candidates = torch.nn.functional.pad(candidates, (0, K - candidates.shape[1]), value=float("-inf"))
        total, best = candidates.topk(K, dim=1)
        best = best.clamp(max=width * each - 1)  # only meets padding
        parent, word = best // each, word.gather(1, best)  # (B, K)
        search.history.append(Beams.of(out, word, log_prob.gather(1, best), parent))
        alive = (slots < (K - count).unsqueeze(1)) & total.isfinite()  # as wide as there is left to finish
        leaving = alive & (word == END)
        score = total / float(words + 1) ** length_normalization
        ended = ended.put(leaving, count, score, words, True)
        count = count + leaving.sum(dim=1)
        live = alive & ~leaving
        if words == max_length - 1:
            ended = ended.put(live, count, score, words, False)
            break
        total = total.masked_fill(~live, float("-inf"))
        tokens = word.masked_fill(~live, END)
        rows = torch.arange(B, device=device).unsqueeze(1) * width + parent  # (B, K)
        remaining = search.remaining(live.any(dim=1))
        if remaining is not None:
            ended = search.keep(remaining, ended)
            if not len(remaining):
                break
            count, total, tokens, rows = count[remaining], total[remaining], tokens[remaining], rows[remaining]
        state = tuple(part.index_select(0, rows.flatten()) for part in out.state)
        tokens = tokens.flatten()
    return [
        sorted(
            (hypothesis for hypothesis in image if hypothesis.score > float("-inf")),
            key=lambda hypothesis: (not hypothesis.finished, -hypothesis.score),
        )
        for image in search.results(ended)
    ]
