"""Stochastic attention: a location is drawn at every step (Sec. 4.1), and its relaxation that needs no estimator."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from captioning.attention.base import Attention, Memory, Score, Selected, expected_context
from captioning.errors import InputError
from captioning.kernels.dropout import Dropout
from captioning.trace import EXPECTATION


class StochasticAttention(Attention):
    """s_t ~ Multinoulli(alpha_t), Eq. 8. Subclasses say how a drawn location reaches the context in training.

    Draws come from torch's global generator.

    Args:
        score: gives the logits that alphas are the softmax of.
        sample_probability: probability that the contexts of an image are drawn in training; otherwise they are the
            expectation ("with probability 0.5 we set the sampled attention location to its expected value", Sec. 4.1).
        ramp: training batches. With two, (first, last), that probability rises linearly from 0 between them; with
            four it also falls back to 0 between the last two; empty, it is constant as in the paper. Until alphas mean
            something, draws teach the decoder to ignore its context; and the last batches then train it for the
            expectation that it is evaluated with.
        per_batch: one decision for all images of a batch, as in the authors' code, instead of one for each.
        dropout: probability of dropping a weight of a context that is the expectation, in training, as in
            ``SoftAttention``. A drawn location is never dropped: without it the decoder would see nothing, and the
            log-probability would not be that of what it saw.
        inference: "expected", "argmax" or "sample"; see ``Attention.inference``.

    Raises:
        InputError: an option out of its range.
    """

    inference_modes = ("expected", "argmax", "sample")
    batches: Tensor

    def __init__(
        self,
        score: Score,
        *,
        sample_probability: float = 0.5,
        ramp: tuple[int, ...] = (),
        per_batch: bool = False,
        dropout: float = 0.0,
        inference: str = "expected",
    ) -> None:
        super().__init__()
        if not 0 <= sample_probability <= 1:
            raise InputError(f"sample_probability must be in [0, 1], got {sample_probability}")
        if len(ramp) not in (0, 2, 4) or list(ramp) != sorted(ramp) or min(ramp, default=0) < 0:
            raise InputError(f"ramp must be none, two or four training batches in rising order, got {list(ramp)}")
        self.score = score
        self.largest_sample_probability = sample_probability
        self.ramp = tuple(ramp)
        self.per_batch = per_batch
        self.dropout = Dropout(dropout)
        self.inference = inference
        # Training batches seen: a buffer, so that a resumed run goes on, and a number, so that no step reads a device.
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self._batches = 0
        self.register_load_state_dict_post_hook(lambda module, _: setattr(module, "_batches", int(module.batches)))

    @property
    def sample_probability(self) -> float:
        """Probability that an image of the next training batch has its contexts drawn."""
        if not self.ramp:
            return self.largest_sample_probability
        share = np.interp(self._batches, self.ramp, (0.0, 1.0, 1.0, 0.0)[: len(self.ramp)])
        return self.largest_sample_probability * float(share)

    @property
    def draws(self) -> bool:
        return self.sample_probability > 0

    @property
    def deterministic(self) -> bool:
        return not self.draws and self.score.deterministic and not self.dropout.p

    def schedule(self) -> dict[str, float]:
        return {"sample_probability": self.sample_probability}

    def prepare(self, annotations: Tensor, mask: Tensor | None = None) -> Memory:
        memory = super().prepare(annotations, mask)
        if not self.training:
            return memory
        probability = self.sample_probability
        self._batches += 1
        self.batches.fill_(self._batches)
        if probability == 1:
            return memory  # nothing to decide, and the sum over locations is saved
        images = len(annotations)
        uniform = torch.rand(1 if self.per_batch else images, device=annotations.device).expand(images)
        return dataclasses.replace(memory, expected=uniform >= probability)

    def groups(self, memory: Memory) -> list[tuple[Tensor, Memory]]:
        if memory.expected is None or not memory.rows_differ or not self.score.deterministic or self.dropout.p:
            return []
        drawn, expected = (images.nonzero().squeeze(1) for images in (~memory.expected, memory.expected))
        if not len(expected):
            return []
        if not len(drawn):
            return [(expected, dataclasses.replace(memory, rows_differ=False))]
        alike = dataclasses.replace(memory.select(expected), rows_differ=False)
        return [(drawn, dataclasses.replace(memory.select(drawn), expected=None)), (expected, alike)]

    def select(self, alphas: Tensor, log_alphas: Tensor, memory: Memory) -> Selected:
        if self.training:
            return self._train(alphas, log_alphas, memory)
        if self.inference == "expected":
            return Selected(expected_context(alphas, memory.annotations), log_prob=torch.zeros_like(alphas[..., 0]))
        return _one_location(log_alphas, alphas.argmax(-1) if self.inference == "argmax" else draw(alphas), memory)

    @abstractmethod
    def _train(self, alphas: Tensor, log_alphas: Tensor, memory: Memory) -> Selected:
        """``select`` in training."""


class HardAttention(StochasticAttention):
    """z_t = sum_i s_ti a_i with one-hot s_t, Eq. 8-9, learned by REINFORCE with an estimator of ``estimators``.

    The context passes no gradient on to the alphas; ``Selected.log_prob`` does.
    """

    needs_estimator = True

    def _train(self, alphas: Tensor, log_alphas: Tensor, memory: Memory) -> Selected:
        locations = draw(alphas.detach())
        if memory.expected is None:
            return _one_location(log_alphas, locations, memory)
        expectation, one_hot = self.dropout(log_alphas.exp()), _one_hot(locations, alphas.detach())
        return _mixture(log_alphas, locations, one_hot, expectation, memory.expected, memory)


class GumbelAttention(StochasticAttention):
    """The control that needs no REINFORCE: straight-through Gumbel-softmax (Jang et al. 2017; Maddison et al. 2017).

    The context is that of one drawn location, as in ``HardAttention``; its gradient is that of the relaxed sample
    softmax((log alpha + g) / temperature) with Gumbel noise g. It is biased, less so the lower the temperature, and
    its variance grows as the temperature falls.

    Args:
        score: gives the logits that alphas are the softmax of.
        temperature: at the first training batch.
        final_temperature: reached after ``anneal`` batches, along an exponential.
        anneal: training batches.
        sample_probability, ramp, per_batch, dropout, inference: as in ``StochasticAttention``; here every image is
            drawn.

    Raises:
        InputError: an option out of its range.
    """

    _batch_temperature: Tensor

    def __init__(
        self,
        score: Score,
        *,
        temperature: float = 1.0,
        final_temperature: float = 0.5,
        anneal: int = 1000,
        sample_probability: float = 1.0,
        ramp: tuple[int, ...] = (),
        per_batch: bool = False,
        dropout: float = 0.0,
        inference: str = "expected",
    ) -> None:
        super().__init__(
            score,
            sample_probability=sample_probability,
            ramp=ramp,
            per_batch=per_batch,
            dropout=dropout,
            inference=inference,
        )
        for name, value in (("temperature", temperature), ("final_temperature", final_temperature)):
            if not 0 < value < math.inf:
                raise InputError(f"{name} must be positive, got {value}; hard draws are the limit 0")
        if anneal < 1:
            raise InputError(f"anneal must be at least 1 training batch, got {anneal}")
        self.first_temperature = temperature
        self.final_temperature = final_temperature
        self.anneal = anneal
        # A tensor, because compiled code is made for one value of a number.
        self.register_buffer("_batch_temperature", torch.tensor(temperature), persistent=False)

    @property
    def temperature(self) -> float:
        """Of the next training batch."""
        progress = min(self._batches / self.anneal, 1.0)
        return self.first_temperature * (self.final_temperature / self.first_temperature) ** progress

    def prepare(self, annotations: Tensor, mask: Tensor | None = None) -> Memory:
        if self.training:
            self._batch_temperature.fill_(self.temperature)  # before the batch is counted
        return super().prepare(annotations, mask)

    def schedule(self) -> dict[str, float]:
        return super().schedule() | {"temperature": self.temperature}

    def _train(self, alphas: Tensor, log_alphas: Tensor, memory: Memory) -> Selected:
        gumbel = -torch.empty_like(alphas).exponential_().log()
        relaxed = torch.softmax((log_alphas + gumbel) / self._batch_temperature, dim=-1)  # (B, R, L)
        locations = relaxed.argmax(dim=-1)
        one_hot = _one_hot(locations, alphas.detach())
        weights = one_hot + (relaxed - relaxed.detach())  # one-hot in value, relaxed in gradient
        expected = memory.expected
        if expected is None:
            expected = torch.zeros(len(alphas), dtype=torch.bool, device=alphas.device)
        return _mixture(log_alphas, locations, weights, self.dropout(log_alphas.exp()), expected, memory)


def draw(alphas: Tensor) -> Tensor:
    """Return one location per row of probabilities (.., L), as indices (..); one of probability 0 is never drawn."""
    # A race of exponential clocks: location i rings first with probability alpha_i. torch.multinomial does the same,
    # and waits for the device to check its input.
    return (alphas / torch.empty_like(alphas).exponential_()).argmax(dim=-1)


def _one_hot(locations: Tensor, alphas: Tensor) -> Tensor:
    """Return 1 at the locations (B, R) and 0 elsewhere, (B, R, L)."""
    return torch.zeros_like(alphas).scatter_(-1, locations.unsqueeze(-1), 1.0)


def _one_location(log_alphas: Tensor, locations: Tensor, memory: Memory) -> Selected:
    """Attend with log_alphas (B, R, L) to one location per row, (B, R): nothing is summed over L."""
    images = torch.arange(locations.shape[0], device=locations.device).unsqueeze(1)
    return Selected(memory.annotations[images, locations], locations, _log_prob(log_alphas, locations))


def _mixture(
    log_alphas: Tensor, locations: Tensor, drawn: Tensor, expectation: Tensor, expected: Tensor, memory: Memory
) -> Selected:
    """Attend with weights ``expectation`` (B, R, L) to the images that are ``expected`` (B,), ``drawn`` to others."""
    expected = expected.unsqueeze(1)  # (B, 1)
    weights = torch.where(expected.unsqueeze(2), expectation, drawn)
    return Selected(
        expected_context(weights, memory.annotations),
        locations.masked_fill(expected, EXPECTATION),
        _log_prob(log_alphas, locations).masked_fill(expected, 0.0),
    )


def _log_prob(log_alphas: Tensor, locations: Tensor) -> Tensor:
    """Return the log-probability in nats of every row's location, (B, R)."""
    return log_alphas.gather(-1, locations.unsqueeze(-1)).squeeze(-1)
