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
"""``fill_slots(log_probs, parent_log_prob, open_count, images)`` fills the slots with continuations of R hypotheses.

Arguments: log-probabilities of the next word (B, R, V) and of the hypotheses (B, R), -inf for none; number of
hypotheses that have not ended (B, 1); indices of the images (B,)."""


def search(
    step: StepFunction,
    state: State,
    fill_slots: FillSlots,
    *,
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
    image_count = B = step.image_count
    device = state[0].device
    R = len(state[0]) // B
    images = torch.arange(B, device=device)
    open_count = torch.full((B, 1), K, device=device)
    log_prob = torch.zeros(B, R, device=device)
    tokens = torch.full((B * R,), START, device=device)
    history = History(*(torch.empty(B, R, 0, dtype=x, device=device) for x in (torch.long, torch.float, torch.long)))
    traces, trace_count, ended = list[AttentionTrace](), 0, list[list[Tensor]]()
    for t in range(max_length):
        out = step(tokens, state)
        log_probs = constraints.mask(out.log_probs, history.words.flatten(0, 1))
        log_prob, parent, word, word_log_prob = fill_slots(log_probs.unflatten(0, (B, R)), log_prob, open_count, images)
        parent_rows = parent + torch.arange(0, B * R, R, device=device).unsqueeze(1)  # (B, K), rows of this step
        added = zip(history, (word, word_log_prob, trace_count + parent_rows), strict=True)
        history = History(*(torch.cat([x.flatten(0, 1)[parent_rows], new.unsqueeze(2)], dim=2) for x, new in added))
        traces.append(out.trace)
        trace_count += B * R
        exists = log_prob.isfinite()
        has_ended = exists & ((word == END) | (t == max_length - 1))
        image, slot = has_ended.nonzero(as_tuple=True)
        padded = (pad(x[image, slot], (0, max_length - t - 1)) for x in history)
        ended.append([*padded, images[image], slot, torch.full_like(slot, t)])
        is_open = exists & ~has_ended
        open_images = is_open.any(dim=1).nonzero().squeeze(1)
        if not len(open_images):
            break
        open_count = open_count - has_ended.sum(dim=1, keepdim=True)
        log_prob, tokens = log_prob.masked_fill(~is_open, float("-inf")), word.masked_fill(~is_open, END)
        if len(open_images) <= B // 2:
            B, step = len(open_images), step.select_images(open_images)
            history = map_fields(history, itemgetter(open_images))
            tensors = images, open_count, log_prob, tokens, parent_rows
            images, open_count, log_prob, tokens, parent_rows = (x[open_images] for x in tensors)
        tokens, R = tokens.flatten(), K  # from the second step on, R is K
        state = tuple(tensor.index_select(0, parent_rows.flatten()) for tensor in out.state)
    hypotheses = _make_hypotheses(ended, traces, length_normalization)
    if len(hypotheses) < image_count:
        raise InputError("the model gives no word a finite probability; use another checkpoint")
    return hypotheses


def _make_hypotheses(
    ended: list[list[Tensor]], traces: list[AttentionTrace], length_normalization: float
) -> list[list[Hypothesis]]:
    ids, log_probs, trace_index, image, slot, last = (torch.cat(fields) for fields in zip(*ended, strict=True))
    log_prob = log_probs.cumsum(dim=1).gather(1, last.unsqueeze(1)).squeeze(1) / (last + 1.0) ** length_normalization
    fields = (None if field[0] is None else torch.cat(field)[trace_index] for field in zip(*traces, strict=True))
    trace = map_fields(AttentionTrace(*fields), lambda x: (x.float() if x.is_floating_point() else x).cpu())
    columns = [column.tolist() for column in (image, slot, last, log_prob, ids, log_probs)]
    hypotheses: dict[int, list[Hypothesis]] = {}  # by image
    rows = sorted(enumerate(zip(*columns, strict=True)), key=lambda row: row[1][:3])  # by image, slot and last step
    for row, (i, _, t, caption_log_prob, words, word_log_probs) in rows:
        finished = words[t] == END
        without_end = slice(t + (not finished))
        caption_trace = map_fields(trace, itemgetter((row, without_end)))
        hypothesis = Hypothesis(words[without_end], word_log_probs[: t + 1], caption_log_prob, finished, caption_trace)
        hypotheses.setdefault(i, []).append(hypothesis)
    return list(hypotheses.values())
