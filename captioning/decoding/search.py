"""The state of a search: its images, and the captions of those that have ended."""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from captioning.decoding.constraints import Constraints, Masks
from captioning.decoding.step import Hypothesis, ImageStepFunction, Step, StepFunction
from captioning.trace import AttentionTrace, State
from captioning.vocabulary import END


class Choices(NamedTuple):
    """One step of B images: the choices for K slots, and the trace of the ``width`` beams before them.

    Attributes:
        word, log_prob: (B, K).
        parent: (B, K), the beam that each slot continues, 0 .. width - 1.
        leaves: (B, K) bool, whether the hypothesis in the slot is complete with this word. At most K hypotheses of an
            image leave in a whole search.
        trace: Of B * width rows.
    """

    word: Tensor
    log_prob: Tensor
    parent: Tensor
    leaves: Tensor
    trace: AttentionTrace

    def select(self, images: Tensor) -> Choices:
        shape = (len(self.word), -1)
        word, log_prob, parent, leaves = (field[images] for field in self[:4])
        trace = self.trace.map(lambda field: field.unflatten(0, shape)[images].flatten(0, 1))
        return Choices(word, log_prob, parent, leaves, trace)


class Search:
    """A search over a batch of images, and the hypotheses of those that have left the batch.

    A step stores its choices. Hypotheses are assembled when their images leave.

    Attributes:
        step: The step function over the images that are still searched.
        history: One entry per step so far, of these images.
    """

    def __init__(
        self,
        step: StepFunction,
        images: int,
        device: torch.device,
        constraints: Constraints,
        *,
        length_normalization: float = 0.0,
    ) -> None:
        self.step = step
        self._masks = Masks(constraints, device)
        self.history: list[Choices] = []
        self._images = torch.arange(images, device=device)
        self._assembled: list[tuple[Tensor, list[list[Hypothesis]]]] = []
        self._length_normalization = length_normalization

    def advance(self, tokens: Tensor, state: State) -> Step:
        """Return the next step, with -inf for the words that the constraints forbid."""
        out = self.step(tokens, state)
        return out._replace(log_probs=self._masks.apply(out.log_probs, len(self.history), self._words))

    def _words(self) -> Tensor:
        """Return the words so far of the rows that are searched, (N, T)."""
        slot = torch.arange(self.history[-1].word.shape[1], device=self._images.device).expand_as(self.history[-1].word)
        words = []
        for beams in reversed(self.history):
            words.append(beams.word.gather(1, slot))
            slot = beams.parent.gather(1, slot)
        return torch.stack(words[::-1], 2).flatten(0, 1)

    def remaining(self, searched: Tensor) -> Tensor | None:
        """Return the images to keep, an empty tensor if all have ended, None if nothing changes.

        Args:
            searched: (B,) bool, True for images that have not ended.
        """
        left = int(searched.sum())
        if left and (left > len(searched) // 2 or not isinstance(self.step, ImageStepFunction)):
            return None
        return searched.nonzero().squeeze(1)

    def keep(self, remaining: Tensor) -> None:
        """Let all images but ``remaining`` (B',) leave."""
        leaving = torch.ones_like(self._images, dtype=torch.bool).index_fill(0, remaining, False).nonzero().squeeze(1)
        history = [beams.select(leaving) for beams in self.history] if len(remaining) else self.history
        self._assembled.append((self._images[leaving], assembled(history, self._length_normalization)))
        self._images = self._images[remaining]
        if len(remaining):
            self.history = [beams.select(remaining) for beams in self.history]
            assert isinstance(self.step, ImageStepFunction)
            self.step = self.step.select(remaining)

    def results(self) -> list[list[Hypothesis]]:
        """Return the hypotheses of all images that the search began with, up to K per image."""
        if len(self._images):
            self.keep(self._images[:0])
        by_image = {
            image: hypotheses
            for images, of_images in self._assembled
            for image, hypotheses in zip(images.tolist(), of_images, strict=True)
        }
        return [by_image[image] for image in range(len(by_image))]


def assembled(history: list[Choices], length_normalization: float) -> list[list[Hypothesis]]:
    """Return up to K hypotheses of each of B images after T steps, ordered by slot and then by step."""
    word, log_prob, parent, leaves = (
        torch.stack(fields, 2) for fields in zip(*(beams[:4] for beams in history), strict=True)
    )  # (B, K, T)
    K, T = leaves.shape[1:]
    leaves = leaves.flatten(1)
    place = leaves.byte().sort(dim=1, descending=True, stable=True).indices[:, :K]  # those that leave come first
    exists, ended, step = leaves.gather(1, place), place // T, place % T  # (B, K), and the slot and step of the end
    slot, slots, rows = ended, [], []
    for t in range(T - 1, -1, -1):  # follow the parents of all hypotheses at once, from the last step to the first
        row = parent[:, :, t].gather(1, slot)
        slots.append(slot)
        rows.append(row)
        slot = torch.where(t <= step, row, slot)
    slots_of, rows_of = (torch.stack(indices[::-1], 2) for indices in (slots, rows))  # (B, K, T)
    ids, log_probs, last = word.gather(1, slots_of), log_prob.gather(1, slots_of), step.unsqueeze(2)
    total = log_probs.cumsum(dim=2).gather(2, last).squeeze(2) / (step + 1.0) ** length_normalization
    finished = ids.gather(2, last).squeeze(2) == END
    trace = _traces(history, rows_of).map(_on_cpu)
    columns = (field.flatten(0, 1).tolist() for field in (exists, total, step, finished, ids, log_probs))
    images: list[list[Hypothesis]] = [[] for _ in ids]
    for n, (is_one, log_prob_of_all, end, is_finished, words, of_words) in enumerate(zip(*columns, strict=True)):
        if is_one:
            count = end + (not is_finished)
            of_steps = trace.map(itemgetter((n, slice(count))))
            hypothesis = Hypothesis(words[:count], of_words[: end + 1], log_prob_of_all, is_finished, of_steps)
            images[n // K].append(hypothesis)
    return images


def _on_cpu(field: Tensor) -> Tensor:
    """Return a trace's field of (B, K, T) steps as (B * K, T, ..) in float32 on the CPU."""
    return (field.float() if field.is_floating_point() else field).flatten(0, 1).cpu()


def _traces(history: list[Choices], rows: Tensor) -> AttentionTrace:
    """Return the trace of the given rows (B, K, T); a row is counted within its image and step."""
    B, device = len(rows), rows.device
    counts = torch.tensor([len(beams.trace.alphas) for beams in history], device=device)  # B * width
    of_image = torch.arange(B, device=device).view(B, 1, 1) * (counts // B)
    rows = counts.cumsum(0) - counts + of_image + rows  # in the rows of all steps, one after the other
    fields = zip(*(beams.trace for beams in history), strict=True)
    return AttentionTrace(*(None if steps[0] is None else torch.cat(steps)[rows] for steps in fields))
