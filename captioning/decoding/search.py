"""A search in a batch of images: the step function it calls, the images still in it, the captions it has found.

``decoding`` holds the strategies; here is what they share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from captioning.decoding.step import Hypothesis, ImageStepFunction, StepFunction
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


class Beams(NamedTuple):
    """One step of B images: what was chosen in K slots, and what the ``width`` rows before them looked at.

    Attributes:
        word, log_prob: (B, K).
        parent: (B, K), the row each slot goes on from, 0 .. width - 1.
        leaves: (B, K) bool, whether the hypothesis in the slot is complete with this word. At most K of an image do so
            in all steps together.
        trace: of the B * width rows.
    """

    word: Tensor
    log_prob: Tensor
    parent: Tensor
    leaves: Tensor
    trace: AttentionTrace

    def select(self, images: Tensor) -> Beams:
        parts = (len(self.word), -1)
        word, log_prob, parent, leaves = (part[images] for part in self[:4])
        trace = self.trace.map(lambda part: part.unflatten(0, parts)[images].flatten(0, 1))
        return Beams(word, log_prob, parent, leaves, trace)


def steps_between_checks(device: torch.device) -> int:
    """How often to ask whether images have ended: that makes an accelerator wait for the host, on a CPU it is free."""
    return 1 if device.type == "cpu" else 4


class Search:
    """The images still being searched, and what was found for those that left.

    A step leaves behind what it chose and nothing else; what hypotheses that makes is found out when images leave.

    Attributes:
        step: over the images still searched.
        history: one entry per step so far, of these images alone.
    """

    def __init__(
        self, step: StepFunction, images: int, device: torch.device, *, length_normalization: float = 0.0
    ) -> None:
        self.step = step
        self.history: list[Beams] = []
        self._images = torch.arange(images, device=device)
        self._found: list[tuple[Tensor, Found]] = []
        self._length_normalization = length_normalization
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

    def keep(self, remaining: Tensor) -> None:
        """Let all other images leave."""
        leaving = torch.ones_like(self._images, dtype=torch.bool).index_fill(0, remaining, False).nonzero().squeeze(1)
        self._leave(leaving, [beams.select(leaving) for beams in self.history] if len(remaining) else self.history)
        self._images = self._images[remaining]
        if len(remaining):
            self.history = [beams.select(remaining) for beams in self.history]
            assert isinstance(self.step, ImageStepFunction)
            self.step = self.step.select(remaining)

    def _leave(self, images: Tensor, history: list[Beams]) -> None:
        self._found.append((self._images[images], find(history, self._length_normalization)))

    def results(self) -> list[list[Hypothesis]]:
        """Return the hypotheses of all images that the search began with, up to K per image."""
        if len(self._images):
            self.keep(self._images[:0])
        by_image = {
            image: hypotheses
            for images, found in self._found
            for image, hypotheses in zip(images.tolist(), found.hypotheses(), strict=True)
        }
        return [by_image[image] for image in range(len(by_image))]


class Found(NamedTuple):
    """The hypotheses of B images in K places, as tables.

    Attributes:
        exists: (B, K) bool.
        score: (B, K), the sum of the log-probabilities, normalised.
        step: (B, K), the last step.
        finished: (B, K) bool, whether it ended with <end>.
        ids, log_probs: (B, K, T), right up to the last step.
        trace: of (B, K, T) steps.
    """

    exists: Tensor
    score: Tensor
    step: Tensor
    finished: Tensor
    ids: Tensor
    log_probs: Tensor
    trace: AttentionTrace

    def hypotheses(self) -> list[list[Hypothesis]]:
        flat_trace = self.trace.map(
            lambda part: (part.float() if part.is_floating_point() else part).flatten(0, 1).cpu()
        )
        images: list[list[Hypothesis]] = [[] for _ in self.ids]
        columns = [column.flatten(0, 1).tolist() for column in self[:-1]]
        for number, (exists, score, step, finished, ids, log_probs) in enumerate(zip(*columns, strict=True)):
            if exists:
                words = step + (not finished)
                trace = AttentionTrace(*(None if part is None else part[number, :words] for part in flat_trace))
                found = Hypothesis(ids[:words], log_probs[: step + 1], score, finished, trace)
                images[number // self.ids.shape[1]].append(found)
        return images


def find(history: list[Beams], length_normalization: float) -> Found:
    """Return the hypotheses that T steps of B images lead to, in the order of the slots that they left."""
    word, log_prob, parent, leaves = (
        torch.stack(parts, 2) for parts in zip(*(beams[:4] for beams in history), strict=True)
    )  # (B, K, T)
    K, T = leaves.shape[1:]
    leaves = leaves.flatten(1)
    place = leaves.byte().sort(dim=1, descending=True, stable=True).indices[:, :K]  # those that leave come first
    exists, slot, step = leaves.gather(1, place), place // T, place % T
    slots, rows = [], []
    for t in range(T - 1, -1, -1):  # follow the parents of all hypotheses at once, from the last step to the first
        row = parent[:, :, t].gather(1, slot)
        slots.append(slot)
        rows.append(row)
        slot = torch.where(t <= step, row, slot)
    slots_of, rows_of = (torch.stack(parts[::-1], 2) for parts in (slots, rows))  # (B, K, T)
    ids, log_probs, last = word.gather(1, slots_of), log_prob.gather(1, slots_of), step.unsqueeze(2)
    score = log_probs.cumsum(dim=2).gather(2, last).squeeze(2) / (step + 1.0) ** length_normalization
    finished = ids.gather(2, last).squeeze(2) == END
    return Found(exists, score, step, finished, ids, log_probs, _traces(history, rows_of))


def _traces(history: list[Beams], rows: Tensor) -> AttentionTrace:
    """Return what the given rows (B, K, T) of every image looked at, counted from 0 at every step."""
    B, device = len(rows), rows.device
    counts = torch.tensor([len(beams.trace.alphas) for beams in history], device=device)  # B * width
    of_image = torch.arange(B, device=device).view(B, 1, 1) * (counts // B)
    rows = counts.cumsum(0) - counts + of_image + rows  # in the rows of all steps, one after the other
    parts = zip(*(beams.trace for beams in history), strict=True)
    return AttentionTrace(*(None if part[0] is None else torch.cat(part)[rows] for part in parts))
