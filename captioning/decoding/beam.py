"""Beam search."""

from __future__ import annotations

import torch

from captioning.decoding.search import Beams, Rules, Search
from captioning.decoding.step import Hypothesis, StepFunction, check_lengths
from captioning.errors import InputError
from captioning.trace import State
from captioning.vocabulary import END, START


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
        state: State of B rows, one per image; after the first step it has K rows per image.
        beam_size: The width K of the beam.
        length_normalization: The exponent a. The score is the log-probability divided by (steps ** a), <end> counted
            as a step: 0 ranks by log-probability, 1 by its mean per step.
        max_length: Largest number of steps. A caption that has not ended by then is cut off after this many words.
        min_length: Smallest number of words before <end>.

    Raises:
        InputError: An option is out of its range, or no word of an image has a finite probability.
    """
    check_lengths(min_length, max_length)
    if beam_size < 1:
        raise InputError(f"beam_size must be at least 1, got {beam_size}")
    B, K, device = state[0].shape[0], beam_size, state[0].device
    rules = Rules.on(device, min_length)
    search = Search(step, B, device, length_normalization=length_normalization)
    slots = torch.arange(K, device=device)
    count = torch.zeros(B, 1, dtype=torch.int64, device=device)  # hypotheses that have left, per image
    total = torch.zeros(B, 1, device=device)  # log-probability of the live beams, -inf for dead ones
    tokens = torch.full((B,), START, device=device)
    for words in range(max_length):
        out = search.step(tokens, state)
        B, width = total.shape
        log_probs = rules.apply(out.log_probs, words)  # (B * width, V)
        # The K best of each row hold the K best of the image.
        log_prob, word = log_probs.topk(min(K, log_probs.shape[1]), dim=1)
        choices = log_prob.shape[1]  # per beam
        log_prob, word = log_prob.view(B, -1), word.view(B, -1)  # (B, width * K)
        candidates = (log_prob.view(B, width, choices) + total.unsqueeze(2)).view(B, -1)
        if candidates.shape[1] < K:  # a beam wider than the vocabulary
            candidates = torch.nn.functional.pad(candidates, (0, K - candidates.shape[1]), value=float("-inf"))
        total, best = candidates.topk(K, dim=1)
        best = best.clamp(max=width * choices - 1)  # changes padding only
        parent, word, log_prob = best // choices, word.gather(1, best), log_prob.gather(1, best)  # (B, K)
        alive = (slots < K - count) & total.isfinite()  # the beam narrows by the hypotheses that have finished
        last = words == max_length - 1
        leaves = alive if last else alive & (word == END)
        search.history.append(Beams(word, log_prob, parent, leaves, out.trace))
        if last:
            break
        live = alive & ~leaves
        count = count + leaves.sum(dim=1, keepdim=True)
        total = total.masked_fill(~live, float("-inf"))
        tokens = word.masked_fill(~live, END)
        rows = parent + torch.arange(0, B * width, width, device=device).unsqueeze(1)  # (B, K)
        remaining = search.remaining(live.any(dim=1))
        if remaining is not None:
            search.keep(remaining)
            if not len(remaining):
                break
            count, total, tokens, rows = count[remaining], total[remaining], tokens[remaining], rows[remaining]
        rows, tokens = rows.flatten(), tokens.flatten()
        state = tuple(tensor.index_select(0, rows) for tensor in out.state)
    hypotheses = search.results()
    if not all(hypotheses):
        raise InputError("the model gives no word a finite probability; use another checkpoint")
    return [sorted(image, key=lambda hypothesis: (not hypothesis.finished, -hypothesis.score)) for image in hypotheses]
