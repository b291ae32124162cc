"""The relaxation of hard attention that needs no estimator: straight-through Gumbel-softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from captioning.attention.base import Attended, Score
from captioning.attention.hard import StochasticAttention, mixed, one_hot
from captioning.attention.memory import Memory
from captioning.errors import InputError


class GumbelAttention(StochasticAttention):
    """Straight-through Gumbel-softmax (Jang et al. 2017; Maddison et al. 2017), the control without REINFORCE.

    The context is that of one drawn location, as in ``HardAttention``. Its gradient is that of the relaxed sample
    softmax((log alpha + g) / temperature) with Gumbel noise g. The gradient is biased: the bias falls and the variance
    grows as the temperature falls.

    Args:
        score: Gives the logits, whose softmax are the alphas.
        temperature: Temperature of the first training batch.
        final_temperature: Temperature after ``anneal`` batches, reached along an exponential.
        anneal: Length of the schedule in training batches.
        sample_probability, ramp, per_batch, dropout, inference: As in ``StochasticAttention``; by default every image
            is drawn.

    Raises:
        InputError: An option is out of its range.
    """

    def __init__(
        self,
        score: Score,
        *,
        temperature: float = 1.0,
        final_temperature: float = 0.5,
        anneal: int = 1000,
        sample_probability: float = 1.0,
        ramp: tuple[float, ...] = (),
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

    @property
    def temperature(self) -> float:
        """Temperature of this training batch."""
        progress = min(self.batch / self.anneal, 1.0)
        return self.first_temperature * (self.final_temperature / self.first_temperature) ** progress

    def schedule(self) -> dict[str, float]:
        return super().schedule() | {"temperature": self.temperature}

    def train_select(self, alphas: Tensor, log_alphas: Tensor, memory: Memory) -> Attended:
        gumbel = -torch.empty_like(alphas).exponential_().log()
        relaxed = torch.softmax((log_alphas + gumbel) / self.temperature, dim=-1)  # (B, R, L)
        locations = relaxed.argmax(dim=-1)
        weights = one_hot(locations, alphas.detach()) + (relaxed - relaxed.detach())  # value one-hot, gradient relaxed
        return mixed(alphas, log_alphas, locations, weights, self.dropout(log_alphas.exp()), memory)
