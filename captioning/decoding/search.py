"""The loop that beam search and sampling share: an image has K slots, which hypotheses leave when they end."""

from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from captioning.decoding.constraints import Constraints
from captioning.decoding.step import Hypothesis, StepFunction
from captioning.errors import InputError
from captioning.trace import AttentionTrace, State, map_fields
from captioning.vocabulary import END, START


class History(NamedTuple):
    """The t steps behind the hypotheses in the slots, (B, K, t) each."""

    words: Tensor
    log_probs: Tensor  # of the words
    trace_index: Tensor  # rows in the concatenated traces of all steps


class Slots(NamedTuple):
    """The hypotheses in the K slots of B images after a step, (B, K) each."""

    log_prob: Tensor  # log-probability of the hypothesis, -inf for an empty slot
    parent: Tensor  # index of the hypothesis that it continues, 0 .. R - 1
    word: Tensor  # its next word
    word_log_prob: Tensor  # log-probability of that word


FillSlots = Callable[[Tensor, Tensor, Tensor, Tensor], Slots]
"""``fill_slots(log_probs, parent_log_prob, slots_left, images)`` fills the slots with continuations of R hypotheses.

Arguments: log-probabilities of the next word (B, R, V) and of the hypotheses (B, R), -inf for none; number of
slots left (B, 1), K minus the hypotheses that have ended; indices of the images (B,)."""


class EndedHypotheses(NamedTuple):
    """The E hypotheses that ended in one step, (E, ..)."""

    words: Tensor  # (E, max_length)
    log_probs: Tensor  # (E, max_length), of the words
    trace_index: Tensor  # (E, max_length), as in ``History``
    image: Tensor
    slot: Tensor
    last_step: Tensor


def search(
    step_function: StepFunction,
    state: State,
    fill_slots: FillSlots,
    K: int,
    max_length: int,
    constraints: Constraints,
    length_normalization: float = 0.0,
) -> list[list[Hypothesis]]:
    """Return up to K hypotheses of every image, sorted by slot, then by the step at which they ended.

    A hypothesis leaves its slot with <end> or at ``max_length``. Once half of the images have finished, these leave the
    batch. ``beam_search`` explains the arguments. Raises InputError if no word has a finite probability.
    """
    constraints.check(max_length)
    image_count = B = step_function.image_count
    device = state[0].device
    R = len(state[0]) // B
    images = torch.arange(B, device=device)
    slots_left = torch.full((B, 1), K, device=device)
    log_prob = torch.zeros(B, R, device=device)
    tokens = torch.full((B * R,), START, device=device)
    history = History(*(torch.empty(B, R, 0, dtype=x, device=device) for x in (torch.long, torch.float, torch.long)))
    traces: list[AttentionTrace] = []
    trace_count = 0
    ended: list[EndedHypotheses] = []
    for t in range(max_length):
        out = step_function(tokens, state)
        log_probs = constraints.mask(out.log_probs, history.words.flatten(0, 1))
        log_prob, parent, word, word_log_prob = fill_slots(log_probs.unflatten(0, (B, R)), log_prob, slots_left, images)
        parent_rows = parent + torch.arange(0, B * R, R, device=device).unsqueeze(1)  # (B, K), rows of this step
        added = zip(history, (word, word_log_prob, trace_count + parent_rows), strict=True)
        history = History(*(torch.cat([x.flatten(0, 1)[parent_rows], new.unsqueeze(2)], dim=2) for x, new in added))
        traces.append(out.trace)
        trace_count += B * R
        exists = log_prob.isfinite()
        has_ended = exists & ((word == END) | (t == max_length - 1))
        position, slot = has_ended.nonzero(as_tuple=True)
        padded = History(*(pad(x[position, slot], (0, max_length - t - 1)) for x in history))
        ended.append(EndedHypotheses(*padded, images[position], slot, torch.full_like(slot, t)))
        is_open = exists & ~has_ended
        open_images = is_open.any(dim=1).nonzero().squeeze(1)
        if not len(open_images):
            break
        slots_left = slots_left - has_ended.sum(dim=1, keepdim=True)
        log_prob = log_prob.masked_fill(~is_open, float("-inf"))
        tokens = word.masked_fill(~is_open, END)
        if len(open_images) <= B // 2:
            B = len(open_images)
            step_function = step_function.select_images(open_images)
            history = map_fields(history, itemgetter(open_images))
            tensors = images, slots_left, log_prob, tokens, parent_rows
            images, slots_left, log_prob, tokens, parent_rows = (x[open_images] for x in tensors)
        tokens, R = tokens.flatten(), K  # from the second step on, R is K
        state = tuple(tensor.index_select(0, parent_rows.flatten()) for tensor in out.state)
    hypotheses = _make_hypotheses(ended, traces, length_normalization)
    if len(hypotheses) < image_count:
        raise InputError("the model gives no word a finite probability; use another checkpoint")
    return hypotheses


def _make_hypotheses(
    ended_by_step: list[EndedHypotheses], traces: list[AttentionTrace], length_normalization: float
) -> list[list[Hypothesis]]:
    ended = EndedHypotheses(*(torch.cat(field) for field in zip(*ended_by_step, strict=True)))
    last = ended.last_step
    sums = ended.log_probs.cumsum(dim=1).gather(1, last.unsqueeze(1)).squeeze(1)
    log_prob = sums / (last + 1.0) ** length_normalization
    fields = (None if field[0] is None else torch.cat(field)[ended.trace_index] for field in zip(*traces, strict=True))
    trace = map_fields(AttentionTrace(*fields), lambda x: (x.float() if x.is_floating_point() else x).cpu())
    columns = [column.tolist() for column in (ended.image, ended.slot, last, log_prob, ended.words, ended.log_probs)]
    hypotheses: dict[int, list[Hypothesis]] = {}  # by image
    rows = sorted(enumerate(zip(*columns, strict=True)), key=lambda row: row[1][:3])  # by image, slot and last step
    for row, (i, _, t, caption_log_prob, words, word_log_probs) in rows:
        finished = words[t] == END
        without_end = slice(t + (not finished))
        caption_trace = map_fields(trace, itemgetter((row, without_end)))
        hypothesis = Hypothesis(words[without_end], word_log_probs[: t + 1], caption_log_prob, finished, caption_trace)
        hypotheses.setdefault(i, []).append(hypothesis)
    return list(hypotheses.values())
