"""A search in a batch of images: the step function it calls, the images still in it, the captions it has found.

``decoding`` holds the strategies; here is what they share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from captioning.decoding.step import Hypothesis, ImageStepFunction, Step, StepFunction
from captioning.errors import InputError
from captioning.trace import AttentionTrace
from captioning.vocabulary import END, PAD, START, UNK


class Rules(NamedTuple):
    """Words that must not be produced: <pad>, <start> and <unk>, and <end> before ``min_length`` words."""

    always: Tensor
    at_first: Tensor
    min_length: int

    @classmethod
    def on(cls, device: torch.device, min_length: int) -> Rules:
        return cls(
            torch.tensor([PAD, START, UNK], device=device),
            torch.tensor([PAD, START, UNK, END], device=device),
            min_length,
        )

    def apply(self, log_probs: Tensor, words: int) -> Tensor:
        """Return log_probs (N, V) as float32, -inf for what must not come after ``words`` words."""
        banned = self.at_first if words < self.min_length else self.always
        return log_probs.float().index_fill(-1, banned, float("-inf"))


def check_lengths(min_length: int, max_length: int) -> None:
    if not 0 <= min_length < max_length:
        raise InputError(f"decoding: need 0 <= min_length < max_length, got {min_length} and {max_length}")


class Beams(NamedTuple):
    """One step of B images: what was chosen in K slots, and what the ``width`` rows before them looked at.

    Attributes:
        word, log_prob: (B, K).
        parent: (B, K), the row each slot goes on from, 0 .. width - 1.
        trace: of the (B, width) rows.
    """

    word: Tensor
    log_prob: Tensor
    parent: Tensor
    trace: AttentionTrace

    @classmethod
    def of(cls, out: Step, word: Tensor, log_prob: Tensor, parent: Tensor) -> Beams:
        return cls(word, log_prob, parent, out.trace.map(lambda part: part.unflatten(0, (len(word), -1))))

    def select(self, images: Tensor) -> Beams:
        word, log_prob, parent = (part[images] for part in self[:3])
        return Beams(word, log_prob, parent, self.trace.map(lambda part: part[images]))


class Ended(NamedTuple):
    """Hypotheses that left the search, (B, K): where they ended in the history, and how they score."""

    score: Tensor
    step: Tensor
    slot: Tensor
    finished: Tensor

    @classmethod
    def none(cls, like: Tensor) -> Ended:
        """Return K empty places for each of B images; ``like`` is (B, K) float."""
        nothing = torch.zeros_like(like, dtype=torch.int64)
        return cls(torch.full_like(like, float("-inf")), nothing, nothing, nothing.bool())

    def put(self, leaving: Tensor, count: Tensor, score: Tensor, step: int, finished: bool) -> Ended:
        """Move the ``leaving`` slots (B, K) to the next free places of each image, after its first ``count`` (B,)."""
        K = leaving.shape[1]
        place = (count.unsqueeze(1) + leaving.cumsum(dim=1) - 1).masked_fill(~leaving, K)
        slots = torch.arange(K, device=leaving.device)
        values = (score, torch.full_like(self.step, step), slots.expand_as(self.slot), leaving & finished)
        moved = []
        for table, value in zip(self, values, strict=True):
            widened = torch.nn.functional.pad(table, (0, 1))  # column K takes what does not leave
            moved.append(widened.scatter(1, place, value)[:, :K])
        return Ended(*moved)

    def select(self, images: Tensor) -> Ended:
        return Ended(*(table[images] for table in self))


def steps_between_checks(device: torch.device) -> int:
    """How often to ask whether images have ended: that makes an accelerator wait for the host, on a CPU it is free."""
    return 1 if device.type == "cpu" else 4


class Search:
    """The images still being searched, and what was found for those that left.

    Attributes:
        step: over the images still searched.
        history: one entry per step so far, of these images alone.
    """

    def __init__(self, step: StepFunction, images: int, device: torch.device) -> None:
        self.step = step
        self.history: list[Beams] = []
        self._images = torch.arange(images, device=device)
        self._found: list[tuple[Tensor, Found]] = []
        self._steps_between_checks = steps_between_checks(device)

    def remaining(self, searched: Tensor) -> Tensor | None:
        """Return the images (B',) to go on with, none of them when all are done; None to go on as before.

        Args:
            searched: (B,) bool, images that have not ended.
        """
        if len(self.history) % self._steps_between_checks:
            return None
        left = int(searched.sum())
        if left and (left > len(searched) // 2 or not isinstance(self.step, ImageStepFunction)):
            return None
        return searched.nonzero().squeeze(1)

    def keep(self, remaining: Tensor, ended: Ended) -> Ended:
        """Let all other images leave; returns ``ended`` of those that remain."""
        leaving = torch.ones_like(self._images, dtype=torch.bool).index_fill(0, remaining, False).nonzero().squeeze(1)
        found = _backtrack([beams.select(leaving) for beams in self.history], ended.select(leaving))
        self._found.append((self._images[leaving], found))
        self._images = self._images[remaining]
        self.history = [beams.select(remaining) for beams in self.history]
        if len(remaining) and isinstance(self.step, ImageStepFunction):
            self.step = self.step.select(remaining)
        return ended.select(remaining)

    def results(self, ended: Ended) -> list[list[Hypothesis]]:
        """Return the hypotheses of all images that the search began with, K per image."""
        if len(self._images):
            self._found.append((self._images, _backtrack(self.history, ended)))
        by_image = {
            image: hypotheses
            for images, found in self._found
            for image, hypotheses in zip(images.tolist(), found.hypotheses(), strict=True)
        }
        return [by_image[image] for image in range(len(by_image))]


class Found(NamedTuple):
    """The K hypotheses of some images as tables (B, K, T, ..); of T steps a hypothesis has ``ended.step`` + 1."""

    ended: Ended
    ids: Tensor
    log_probs: Tensor
    trace: AttentionTrace

    def hypotheses(self) -> list[list[Hypothesis]]:
        flat_trace = self.trace.map(
            lambda part: (part.float() if part.is_floating_point() else part).flatten(0, 1).cpu()
        )
        columns = [column.flatten(0, 1).tolist() for column in (*self.ended, self.ids, self.log_probs)]
        flat = []
        for number, (score, step, _, finished, ids, log_probs) in enumerate(zip(*columns, strict=True)):
            words = step + (not finished)
            trace = AttentionTrace(*(None if part is None else part[number, :words] for part in flat_trace))
            flat.append(Hypothesis(ids[:words], log_probs[: step + 1], score, finished, trace))
        K = self.ids.shape[1]
        return [flat[first : first + K] for first in range(0, len(flat), K)]


def _backtrack(history: list[Beams], ended: Ended) -> Found:
    """Follow the parents of all hypotheses at once, from the last step to the first."""
    slot = ended.slot
    images = torch.arange(len(slot), device=slot.device).unsqueeze(1)
    columns: list[tuple[Tensor, Tensor, AttentionTrace]] = []
    for t in range(len(history) - 1, -1, -1):
        beams = history[t]
        parent = beams.parent.gather(1, slot)
        trace = AttentionTrace(*(None if part is None else part[images, parent] for part in beams.trace))
        columns.append((beams.word.gather(1, slot), beams.log_prob.gather(1, slot), trace))
        slot = torch.where(t <= ended.step, parent, slot)
    ids, log_probs, traces = zip(*reversed(columns), strict=True)
    parts = (None if part[0] is None else torch.stack(part, 2) for part in zip(*traces, strict=True))
    return Found(ended, torch.stack(ids, 2), torch.stack(log_probs, 2), AttentionTrace(*parts))
