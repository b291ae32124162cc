"""Scheduled sampling (Bengio et al. 2015): in training, some of the words that are fed are the model's own.

Under teacher forcing a model never reads its own mistakes; in a search it reads nothing else. Here every word that is
fed is, with a probability that rises while training goes on, one that the model itself would say there, drawn given the
words that were fed before, drawn ones included. The words to be said stay those of the caption, and no gradient goes
through a draw.

Two passes: the first draws, word by word, the second is ordinary teacher forcing with the words that came of it, by
the same fast kernels. Mihaylova & Martins 2019 draw all words of the first pass at once, given the true words before
them; a transformer is then as fast as before, but a word drawn after a drawn one is not what the model would say there.
Here the distribution is exact, for every decoder: a recurrence takes its steps one by one anyway, so that the first
pass costs no more than theirs, and the transformer has its cache. It is a search step: the decoder as it is evaluated,
without dropout, and without gradient. The annotations are those of the training step, with their dropout and the
batch's statistics: the encoder works once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from captioning.attention import Memory
from captioning.attention.base import for_rows
from captioning.data.batch import CaptionBatch
from captioning.decoding.sampling import draw_words
from captioning.decoding.search import Rules
from captioning.errors import InputError, check_range
from captioning.model import Captioner

_STEEPNESS = 6.0
"""The logistic curve is that of -6 .. 6, where it is 0.25 % from its ends; they are then moved to 0 and 1."""


@dataclass(frozen=True)
class ScheduledSampling:
    """Feed the decoder words of its own in training, ever more of them.

    Attributes:
        probability: that a word is drawn from the model, once the ramp has ended.
        start: training batches before the first word is drawn.
        end: training batches until ``probability`` is reached.
        ramp: "linear", or "inverse_sigmoid", which begins and ends slowly and is steepest half-way.

    Raises:
        InputError: an option out of its range.
    """

    probability: float = 0.25
    start: int = 0
    end: int = 0
    ramp: Literal["linear", "inverse_sigmoid"] = "linear"

    def __post_init__(self) -> None:
        check_range(0, 1, **{"scheduled_sampling.probability": self.probability})
        if not 0 <= self.start <= self.end:
            given = f"start {self.start} and end {self.end}"
            raise InputError(f"scheduled_sampling: start and end are training batches in rising order, got {given}")
        if self.ramp not in ("linear", "inverse_sigmoid"):
            raise InputError(f"scheduled_sampling.ramp must be linear or inverse_sigmoid, got {self.ramp!r}")

    def at(self, batches: int) -> float:
        """Return the probability that a word of a batch is drawn, after so many batches of training."""
        if batches < self.start:
            return 0.0
        if batches >= self.end:
            return self.probability
        share = (batches - self.start) / (self.end - self.start)
        if self.ramp == "inverse_sigmoid":
            low = _logistic(-_STEEPNESS)
            share = (_logistic(_STEEPNESS * (2 * share - 1)) - low) / (1 - 2 * low)
        return self.probability * share


class WordSampler(nn.Module):
    """Draws the words that training feeds, and counts the batches: a resumed run goes on where it was."""

    batches: Tensor

    def __init__(self, options: ScheduledSampling) -> None:
        super().__init__()
        self.options = options
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self._batches = 0  # a number beside the buffer, so that no step reads a device
        self.register_load_state_dict_post_hook(lambda module, _: setattr(module, "_batches", int(module.batches)))

    def forward(self, captioner: Captioner, batch: CaptionBatch, memory: Memory) -> tuple[CaptionBatch, float]:
        """Return a training batch with words of the model's own in the place of some, and their probability."""
        probability = self.options.at(self._batches)
        self._batches += 1
        self.batches.fill_(self._batches)
        return (mixed(captioner, batch, memory, probability) if probability else batch), probability


@torch.no_grad()
def mixed(captioner: Captioner, batch: CaptionBatch, memory: Memory, probability: float) -> CaptionBatch:
    """Return the batch with ``inputs``, each of which but <start> is drawn from the model with a probability.

    Words are drawn given that the caption goes on, among those that a search may take, from torch's global generator.

    Args:
        memory: of the batch's images.
    """
    inputs, device = batch.captions[:, :-1].clone(), batch.captions.device
    N, T = inputs.shape
    own = torch.rand(N, T, device=device) < probability
    own &= torch.arange(T, device=device) < batch.lengths.unsqueeze(1)
    own[:, 0] = False
    uniform = torch.rand(N, T, dtype=torch.float64, device=device)
    steps, rows = own.T.nonzero().unbind(1)
    counts = torch.bincount(steps, minlength=T).tolist()  # waits for the device, once
    if not any(counts):
        return batch
    rows_of = rows.split(counts)  # the rows for which a word is drawn at a step
    decoder, memory = captioner.decoder, captioner.memory_of_captions(batch, memory)
    rules = Rules.on(device, min_length=1)
    training = decoder.training
    decoder.eval()
    try:
        step = captioner.stepper(memory)
        state = for_rows(decoder.init_state(memory), N // len(memory.annotations))
        for t in range(1, max(t for t, count in enumerate(counts) if count) + 1):
            out = step(inputs[:, t - 1], state)
            state, rows = out.state, rows_of[t]
            inputs[rows, t] = draw_words(rules.apply(out.log_probs[rows], 0), uniform[rows, t : t + 1])
    finally:
        decoder.train(training)
    return replace(batch, inputs=inputs)


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))
