"""Captions from a step function: greedy, sampling, beam search. Nothing here knows a model.

A step function takes ``(tokens (N,), state)`` and returns a ``Step``. The state is a tuple of tensors whose first axis
is N = images * rows, the rows of an image adjacent; between steps it is reordered with ``index_select`` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from captioning.errors import InputError
from captioning.vocabulary import END, PAD, START, UNK

State = tuple[Tensor, ...]


class Step(NamedTuple):
    """One step of N rows: log_probs (N, V) in nats, the new state, and what it was made with.

    That is alphas (N, L), betas (N,) and the weights (N, L) of the context: alphas again, or the location drawn.
    """

    log_probs: Tensor
    state: State
    alphas: Tensor
    betas: Tensor
    weights: Tensor


StepFunction = Callable[[Tensor, State], Step]


@dataclass(frozen=True)
class BeamOptions:
    """How captions are searched for in evaluation; see ``beam_search``. A beam of 1 is greedy decoding."""

    beam_size: int = 3
    length_normalization: float = 0.0
    max_length: int = 30
    min_length: int = 1


@dataclass(frozen=True)
class Hypothesis:
    """One decoded caption.

    Attributes:
        ids: word ids, without <start> and <end>.
        log_probs: nats per word; one more for <end> when the caption is finished.
        score: what hypotheses are ranked by: the sum of ``log_probs``, divided by the length normalisation.
        finished: False when the maximum length cut the caption off.
        alphas: (len(ids), L), the probabilities of locations that were current when each word was chosen.
        betas: (len(ids),).
        weights: (len(ids), L), what the contexts were formed with: alphas, or one-hot where hard attention chose.
    """

    ids: list[int]
    log_probs: list[float]
    score: float
    finished: bool
    alphas: Tensor
    betas: Tensor
    weights: Tensor


def _allowed(log_probs: Tensor, words: int, min_length: int) -> Tensor:
    """Rule out what must not be produced after ``words`` words: <pad>, <start>, <unk>, and <end> when too early."""
    banned = [PAD, START, UNK] + ([END] if words < min_length else [])
    return log_probs.index_fill(-1, torch.tensor(banned, device=log_probs.device), float("-inf"))


def _check_lengths(min_length: int, max_length: int) -> None:
    if not 0 <= min_length < max_length:
        raise InputError(f"decoding: need 0 <= min_length < max_length, got {min_length} and {max_length}")


def greedy(step: StepFunction, state: State, *, max_length: int = 30, min_length: int = 0) -> list[Hypothesis]:
    """Return the caption that takes the most probable word at every step, one per row of ``state``.

    Args:
        max_length: steps. A caption that has not ended by then is cut off after this many words.
        min_length: words before <end> may come.
    """
    return _roll_out(step, state, lambda log_probs: log_probs.argmax(dim=-1), max_length, min_length)


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

    Scores and log-probabilities are the model's own, not those of the tempered and cut distribution.

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

    def draw(log_probs: Tensor) -> Tensor:
        log_probs = log_probs / temperature
        if top_k is not None:
            least = log_probs.topk(min(top_k, log_probs.shape[-1]), dim=-1).values[:, -1:]
            log_probs = log_probs.masked_fill(log_probs < least, float("-inf"))
        if top_p is not None:
            ordered, order = log_probs.softmax(dim=-1).sort(dim=-1, descending=True)
            before = ordered.cumsum(dim=-1) - ordered  # the word that crosses top_p is still in the set
            outside = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
            log_probs = log_probs.masked_fill(outside, float("-inf"))
        return torch.multinomial(log_probs.softmax(dim=-1), 1).squeeze(-1)

    return _roll_out(step, state, draw, max_length, min_length)


def _roll_out(
    step: StepFunction, state: State, choose: Callable[[Tensor], Tensor], max_length: int, min_length: int
) -> list[Hypothesis]:
    _check_lengths(min_length, max_length)
    rows, device = state[0].shape[0], state[0].device
    tokens = torch.full((rows,), START, device=device)
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    ids, log_probs, alphas, betas, weights = [], [], [], [], []
    for words in range(max_length):
        out = step(tokens, state)
        state = out.state
        allowed = _allowed(out.log_probs.float(), words, min_length)
        tokens = choose(allowed).masked_fill(ended, END)
        ids.append(tokens)
        log_probs.append(allowed.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))
        alphas.append(out.alphas)
        betas.append(out.betas)
        weights.append(out.weights)
        ended = ended | (tokens == END)
        if ended.all():
            break
    table = torch.stack(ids, 1)
    steps = (table != END).sum(dim=1) + ended  # words, and <end> where it came
    chosen = torch.stack(log_probs, 1)
    exists = torch.arange(table.shape[1], device=device) < steps.unsqueeze(1)
    score = (chosen.masked_fill(~exists, 0.0)).sum(dim=1)
    looked = (torch.stack(column, 1) for column in (alphas, betas, weights))
    return _hypotheses(table, chosen, score, steps, ended, *looked)


def _hypotheses(
    ids: Tensor,
    log_probs: Tensor,
    score: Tensor,
    steps: Tensor,
    finished: Tensor,
    alphas: Tensor,
    betas: Tensor,
    weights: Tensor,
) -> list[Hypothesis]:
    """Cut tables (N, T, ..) into hypotheses of ``steps`` (N,) steps each, <end> counted."""
    alphas, betas, weights = alphas.float().cpu(), betas.float().cpu(), weights.float().cpu()
    hypotheses = []
    columns = (ids.tolist(), log_probs.tolist(), score.tolist(), steps.tolist(), finished.tolist())
    for row, (row_ids, row_log_probs, row_score, row_steps, row_finished) in enumerate(zip(*columns, strict=True)):
        words = row_steps - int(row_finished)
        hypotheses.append(
            Hypothesis(
                ids=row_ids[:words],
                log_probs=row_log_probs[:row_steps],
                score=row_score,
                finished=row_finished,
                alphas=alphas[row, :words],
                betas=betas[row, :words],
                weights=weights[row, :words],
            )
        )
    return hypotheses


class _Beams(NamedTuple):
    """One step of the search: the K best extensions (B, K), and what the rows they came from looked at."""

    word: Tensor
    parent: Tensor
    log_prob: Tensor
    alphas: Tensor
    betas: Tensor
    weights: Tensor


class _Ended(NamedTuple):
    """Hypotheses that left the search, (B, K): where they ended in the history, and how they score."""

    score: Tensor
    step: Tensor
    slot: Tensor
    finished: Tensor

    def put(self, leaving: Tensor, count: Tensor, *values: Tensor | float) -> _Ended:
        """Move the ``leaving`` slots (B, K) to the next free places of each image, after its first ``count`` (B,)."""
        K = leaving.shape[1]
        place = (count.unsqueeze(1) + leaving.cumsum(dim=1) - 1).masked_fill(~leaving, K)
        moved = []
        for table, value in zip(self, values, strict=True):
            column = torch.as_tensor(value, dtype=table.dtype, device=table.device).expand_as(table)
            widened = torch.nn.functional.pad(table, (0, 1))  # column K takes what does not leave
            moved.append(widened.scatter(1, place, column)[:, :K])
        return _Ended(*moved)


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
    slots = torch.arange(K, device=device).expand(B, K)
    nothing = torch.zeros(B, K, dtype=torch.int64, device=device)
    ended = _Ended(torch.full((B, K), float("-inf"), device=device), nothing, nothing, nothing.bool())
    count = torch.zeros(B, dtype=torch.int64, device=device)  # hypotheses that have left, per image
    total = torch.zeros(B, 1, device=device)  # log-probability of the live beams, -inf for dead ones
    tokens = torch.full((B,), START, device=device)
    history: list[_Beams] = []
    for words in range(max_length):
        out = step(tokens, state)
        width = total.shape[1]
        log_probs = _allowed(out.log_probs.float(), words, min_length).view(B, width, -1)
        V = log_probs.shape[-1]
        candidates = (total.unsqueeze(-1) + log_probs).flatten(1)  # (B, width * V)
        if candidates.shape[1] < K:  # a beam wider than the vocabulary
            candidates = torch.nn.functional.pad(candidates, (0, K - candidates.shape[1]), value=float("-inf"))
        total, best = candidates.topk(K, dim=1)
        parent, word = (best // V).clamp(max=width - 1), best % V  # (B, K); the clamp only meets padding
        rows = (torch.arange(B, device=device).unsqueeze(1) * width + parent).flatten()
        history.append(
            _Beams(
                word=word,
                parent=parent,
                log_prob=log_probs.flatten(0, 1)[rows, word.flatten()].view(B, K),
                alphas=out.alphas[rows].view(B, K, -1),
                betas=out.betas[rows].view(B, K),
                weights=out.weights[rows].view(B, K, -1),
            )
        )
        alive = (slots < (K - count).unsqueeze(1)) & total.isfinite()  # as wide as there is left to finish
        leaving = alive & (word == END)
        score = total / float(words + 1) ** length_normalization
        ended = ended.put(leaving, count, score, words, slots, True)
        count = count + leaving.sum(dim=1)
        live = alive & ~leaving
        total = total.masked_fill(~live, float("-inf"))
        if words == max_length - 1:
            ended = ended.put(live, count, score, words, slots, False)
        elif not live.any():
            break
        state = tuple(part.index_select(0, rows) for part in out.state)
        tokens = word.masked_fill(~live, END).flatten()
    return _backtrack(history, ended)


def _backtrack(history: list[_Beams], ended: _Ended) -> list[list[Hypothesis]]:
    """Follow the parents of all hypotheses at once, from the last step to the first."""
    B, K = ended.score.shape
    slot = ended.slot
    columns: list[tuple[Tensor, ...]] = []
    for t in range(len(history) - 1, -1, -1):
        beams = history[t]
        before_end = t <= ended.step
        place = slot.unsqueeze(-1).expand(B, K, beams.alphas.shape[-1])
        columns.append(
            (
                beams.word.gather(1, slot),
                beams.log_prob.gather(1, slot),
                beams.alphas.gather(1, place),
                beams.betas.gather(1, slot),
                beams.weights.gather(1, place),
            )
        )
        slot = torch.where(before_end, beams.parent.gather(1, slot), slot)
    ids, log_probs, *looked = (torch.stack(column[::-1], 2).flatten(0, 1) for column in zip(*columns, strict=True))
    flat = _hypotheses(
        ids, log_probs, ended.score.flatten(), (ended.step + 1).flatten(), ended.finished.flatten(), *looked
    )
    results = []
    for image in range(B):
        found = [h for h in flat[image * K : (image + 1) * K] if h.score > float("-inf")]
        results.append(sorted(found, key=lambda hypothesis: (not hypothesis.finished, -hypothesis.score)))
    return results
