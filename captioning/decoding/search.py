"""The loop that beam search and sampling share: K slots for each image, and the hypotheses that leave them."""

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


class Slots(NamedTuple):
    """The hypotheses in the K slots of B images after a step, (B, K) each."""

    total: Tensor  # log-probability of the hypothesis, -inf for none
    parent: Tensor  # the beam that it continues, 0 .. R - 1
    word: Tensor  # its next word
    word_log_prob: Tensor  # log-probability of that word


Choose = Callable[[Tensor, Tensor, Tensor, Tensor], Slots]
"""``choose(log_probs, total, open_count, images)`` fills the slots with continuations of R beams.

Arguments: log-probabilities of the next word (B, R, V) and of the beams (B, R), -inf for no beam; number of
hypotheses that have not ended (B, 1); numbers of the images (B,)."""


def search(
    step: StepFunction,
    state: State,
    choose: Choose,
    *,
    K: int,
    max_length: int,
    constraints: Constraints,
    length_normalization: float = 0.0,
) -> list[list[Hypothesis]]:
    """Return up to K hypotheses of every image, by slot and then by step; ``beam_search`` explains the other arguments.

    A hypothesis leaves its slot with <end> or at ``max_length``. Once half of the images are finished, these leave the
    batch. Raises InputError if no word has a finite probability.
    """
    constraints.check(max_length)
    image_count = B = step.image_count
    device = state[0].device
    R = len(state[0]) // B
    images = torch.arange(B, device=device)
    open_count = torch.full((B, 1), K, device=device)
    total = torch.zeros(B, R, device=device)
    tokens = torch.full((B * R,), START, device=device)
    # Words, log-probabilities and numbers of traces of all hypotheses in the slots: (B, R, t) each.
    history = [torch.empty(B, R, 0, dtype=dtype, device=device) for dtype in (torch.int64, torch.float32, torch.int64)]
    traces, trace_count, complete = list[AttentionTrace](), 0, list[list[Tensor]]()
    for t in range(max_length):
        out = step(tokens, state)
        log_probs = constraints.mask(out.log_probs, history[0].flatten(0, 1))
        total, parent, word, word_log_prob = choose(log_probs.unflatten(0, (B, R)), total, open_count, images)
        rows = parent + torch.arange(0, B * R, R, device=device).unsqueeze(1)  # (B, K)
        entries = word, word_log_prob, trace_count + rows
        history = [
            torch.cat([old.flatten(0, 1)[rows], new.unsqueeze(2)], 2) for old, new in zip(history, entries, strict=True)
        ]
        traces.append(out.trace)
        trace_count += B * R
        exists = total.isfinite()
        ended = exists & ((word == END) | (t == max_length - 1))
        image, slot = ended.nonzero(as_tuple=True)
        padded = (pad(x[image, slot], (0, max_length - t - 1)) for x in history)
        complete.append([*padded, images[image], slot, torch.full_like(slot, t)])
        growing = exists & ~ended
        searched = growing.any(dim=1)
        remaining = int(searched.sum())
        if not remaining:
            break
        open_count = open_count - ended.sum(dim=1, keepdim=True)
        total, words = total.masked_fill(~growing, float("-inf")), word.masked_fill(~growing, END)
        if remaining <= B // 2:
            unfinished, B = searched.nonzero().squeeze(1), remaining
            step, history = step.select_images(unfinished), [x[unfinished] for x in history]
            images, open_count, total, words, rows = (x[unfinished] for x in (images, open_count, total, words, rows))
        tokens, R = words.flatten(), K
        state = tuple(tensor.index_select(0, rows.flatten()) for tensor in out.state)
    hypotheses = _hypotheses(complete, traces, length_normalization)
    if len(hypotheses) < image_count:
        raise InputError("the model gives no word a finite probability; use another checkpoint")
    return hypotheses


def _hypotheses(
    complete: list[list[Tensor]], traces: list[AttentionTrace], length_normalization: float
) -> list[list[Hypothesis]]:
    ids, log_probs, numbers, image, slot, last = (torch.cat(fields) for fields in zip(*complete, strict=True))
    total = log_probs.cumsum(dim=1).gather(1, last.unsqueeze(1)).squeeze(1) / (last + 1.0) ** length_normalization
    fields = (None if field[0] is None else torch.cat(field)[numbers] for field in zip(*traces, strict=True))
    trace = map_fields(AttentionTrace(*fields), lambda x: (x.float() if x.is_floating_point() else x).cpu())
    columns = [column.tolist() for column in (image, slot, last, total, ids, log_probs)]
    images: dict[int, list[Hypothesis]] = {}
    rows = sorted(enumerate(zip(*columns, strict=True)), key=lambda row: row[1][:3])  # by image, slot and last step
    for n, (i, _, end, log_prob, words, word_log_probs) in rows:
        finished = words[end] == END
        without_end = slice(end + (not finished))
        own_trace = map_fields(trace, itemgetter((n, without_end)))
        hypothesis = Hypothesis(words[without_end], word_log_probs[: end + 1], log_prob, finished, own_trace)
        images.setdefault(i, []).append(hypothesis)
    return list(images.values())
