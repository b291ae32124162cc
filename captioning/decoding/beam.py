"""Beam search, in one beam or in diverse groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import itemgetter

import torch
from torch import Tensor

from captioning.decoding.constraints import Constraints
from captioning.decoding.search import Choices, Search
from captioning.decoding.step import Hypothesis, StepFunction
from captioning.errors import InputError
from captioning.trace import State
from captioning.vocabulary import END, START

DIVERSITY = 0.5
"""Default strength of diverse groups, in nats."""


def beam_search(
    step: StepFunction,
    state: State,
    *,
    beam_size: int,
    groups: int = 1,
    diversity: float = DIVERSITY,
    length_normalization: float = 0.0,
    max_length: int = 30,
    constraints: Constraints = Constraints(),  # noqa: B008 - frozen
) -> list[list[Hypothesis]]:
    """Return up to K captions per image, best first; all images are searched in one batch.

    As in the authors' code, a finished hypothesis leaves the beam and narrows it; the search for an image ends when K
    have finished, or at ``max_length``, where those still alive are returned as unfinished, after the finished ones.

    With several groups this is diverse beam search (Vijayakumar et al. 2018): every group is a beam of K / groups, and
    a word costs it ``diversity`` for each beam of the groups before it that chose the word at the same step (Hamming
    diversity). The best of every group come first, then the second of every group. Log-probabilities are
    the model's own.

    Args:
        state: State of B rows, one per image; after the first step it has K rows per image.
        beam_size: The width K of the beam, of all groups together.
        groups: Number of groups, a divisor of K.
        diversity: Penalty for each beam that chose the word, in nats.
        length_normalization: The exponent a. Captions are ranked by the log-probability divided by (steps ** a), <end>
            counted as a step: 0 ranks by log-probability, 1 by its mean per step.
        max_length: Largest number of steps. A caption that has not ended by then is cut off after this many words.
        constraints: What the words must be.

    Raises:
        InputError: An option is out of its range, or no word of an image has a finite probability.
    """
    constraints.check(max_length)
    if beam_size < 1:
        raise InputError(f"beam_size must be at least 1, got {beam_size}")
    if groups < 1 or beam_size % groups:
        raise InputError(f"beam_size {beam_size} must be a multiple of the {groups} groups")
    B, G, W, device = state[0].shape[0], groups, beam_size // groups, state[0].device
    search = Search(step, B, device, constraints, length_normalization=length_normalization)
    count = torch.zeros(B, G, 1, dtype=torch.int64, device=device)  # hypotheses that have left, per group
    total = torch.zeros(B, G, 1, device=device)  # log-probability of the live beams, -inf for dead ones
    tokens = torch.full((B,), START, device=device)
    for words in range(max_length):
        out = search.advance(tokens, state)
        B, rows = len(total), len(tokens) // len(total)
        total, parent, word, log_prob, alive = _continued(out.log_probs, total, W - count, W, diversity)  # (B, G, W)
        last = words == max_length - 1
        leaves = alive if last else alive & (word == END)
        chosen = Choices(word.flatten(1), log_prob.flatten(1), parent.flatten(1), leaves.flatten(1), out.trace)
        search.history.append(chosen)
        if last:
            break
        live = alive & ~leaves
        count = count + leaves.sum(dim=2, keepdim=True)
        total = total.masked_fill(~live, float("-inf"))
        tokens = word.masked_fill(~live, END)
        parent = parent + torch.arange(0, B * rows, rows, device=device).view(B, 1, 1)
        remaining = search.remaining(live.flatten(1).any(dim=1))
        if remaining is not None:
            search.keep(remaining)
            if not len(remaining):
                break
            count, total, tokens, parent = count[remaining], total[remaining], tokens[remaining], parent[remaining]
        tokens, parent = tokens.flatten(), parent.flatten()
        state = tuple(tensor.index_select(0, parent) for tensor in out.state)
    hypotheses = search.results()
    if not all(hypotheses):
        raise InputError("the model gives no word a finite probability; use another checkpoint")
    return [_ranked(image, W) for image in hypotheses]


def _continued(log_probs: Tensor, total: Tensor, places: Tensor, size: int, diversity: float) -> tuple[Tensor, ...]:
    """Return the best continuations of every group: total, parent among the image's rows, word, log_prob, alive.

    Args:
        log_probs: (B * rows, V); all groups of an image share its row at the first step.
        total: (B, G, width), the penalised log-probabilities of the beams.
        places: (B, G, 1), how many beams the groups still have.
        size: Number W of continuations of a group. The results are (B, G, W).
        diversity: Penalty for each beam of an earlier group that chose the word.
    """
    (B, G, width), V, device = total.shape, log_probs.shape[1], total.device
    log_probs = log_probs.view(B, -1, width, V)
    first_rows = torch.arange(log_probs.shape[1], device=device).view(-1, 1) * width
    log_probs = log_probs.expand(B, G, width, V)
    slots = torch.arange(size, device=device)
    chosen: Tensor | None = None  # (B, V), the number of beams of earlier groups by the word that they chose
    groups = []
    for g in range(G):
        model = log_probs[:, g]
        penalised = model if chosen is None else model - diversity * chosen.unsqueeze(1)
        best_total, parent, word = _best(penalised, total[:, g], size)
        log_prob = model.flatten(1).gather(1, parent * V + word)
        alive = (slots < places[:, g]) & best_total.isfinite()  # the beam narrows by the hypotheses that have finished
        if g + 1 < G:
            chosen = torch.zeros(B, V, device=device) if chosen is None else chosen
            chosen = chosen.scatter_add(1, word, alive.float())
        groups.append((best_total, parent, word, log_prob, alive))
    total, parent, word, log_prob, alive = (torch.stack(fields, 1) for fields in zip(*groups, strict=True))
    return total, parent + first_rows, word, log_prob, alive


def _best(log_probs: Tensor, total: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ``size`` best continuations of B beams of some width: total, parent and word, (B, size) each."""
    # The best of each row hold the best of the image.
    log_prob, word = log_probs.topk(min(size, log_probs.shape[2]), dim=2)
    choices = log_prob.shape[2]  # per beam
    candidates, word = (log_prob + total.unsqueeze(2)).flatten(1), word.flatten(1)
    least = candidates.shape[1]
    if least < size:  # a beam wider than the vocabulary
        candidates = torch.nn.functional.pad(candidates, (0, size - least), value=float("-inf"))
    total, best = candidates.topk(size, dim=1)
    best = best.clamp(max=least - 1)  # changes padding only
    return total, best // choices, word.gather(1, best)


def _ranked(hypotheses: Iterable[Hypothesis], size: int) -> list[Hypothesis]:
    """Return an image's hypotheses, the best of every group of ``size`` slots first, then the second, and so on."""
    ranks: Counter[int] = Counter()
    ranked = []
    for hypothesis in sorted(hypotheses, key=lambda hypothesis: (not hypothesis.finished, -hypothesis.log_prob)):
        group = hypothesis.slot // size
        ranked.append((ranks[group], hypothesis))
        ranks[group] += 1
    return [hypothesis for _, hypothesis in sorted(ranked, key=itemgetter(0))]
