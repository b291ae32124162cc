"""The relaxation of hard attention that needs no estimator: straight-through Gumbel-softmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from captioning.attention.base import AttentionOutput
from captioning.attention.hard import StochasticAttention, mixed, one_hot
from captioning.attention.memory import Memory
from captioning.attention.scores import Score
from captioning.errors import InputError


class GumbelAttention(StochasticAttention):
    """Straight-through Gumbel-softmax (Jang et al. 2017; Maddison et al. 2017), the control without REINFORCE.

    The context is the annotation of one drawn location, as in ``HardAttention``. The backward pass differentiates the
    relaxed sample softmax((log alpha + g) / temperature) with Gumbel noise g instead. The gradient is biased: the bias
    falls and the variance grows as the temperature falls.

    Args:
        score: Gives the logits, whose softmax are the alphas.
        temperature: Temperature at the beginning of training; by its end it has fallen to half along an exponential.
        sample_probability, ramp, per_batch, dropout, inference: As in ``StochasticAttention``; by default every image
            is drawn.
    """

    def __init__(
        self,
        score: Score,
        *,
        temperature: float = 1.0,
        sample_probability: float = 1.0,
        ramp: tuple[float, ...] = (),
        per_batch: bool = False,
        dropout: float = 0.0,
        inference: str = "expected",
    ) -> None:
        options: dict[str, Any] = {"ramp": ramp, "per_batch": per_batch, "dropout": dropout, "inference": inference}
        super().__init__(score, sample_probability=sample_probability, **options)
        if not 0 < temperature < math.inf:
            raise InputError(f"temperature must be positive, got {temperature}; hard draws are the limit 0")
        self.first_temperature = temperature

    @property
    def temperature(self) -> float:
        """Temperature of this training batch."""
        return self.first_temperature * 0.5 ** min(self.progress, 1.0)

    @property
    def scheduled(self) -> bool:
        return True  # the temperature

    def schedule(self) -> dict[str, float]:
        return super().schedule() | {"temperature": self.temperature}

    def train_select(self, alphas: Tensor, log_alphas: Tensor, memory: Memory) -> AttentionOutput:
        gumbel = -torch.empty_like(alphas).exponential_().log()
        relaxed = torch.softmax((log_alphas + gumbel) / self.temperature, dim=-1)  # (B, R, L)
        locations = relaxed.argmax(dim=-1)
        weights = one_hot(locations, alphas.detach()) + (relaxed - relaxed.detach())  # value one-hot, gradient relaxed
        return mixed(alphas, log_alphas, locations, weights, self.dropout(log_alphas.exp()), memory)
