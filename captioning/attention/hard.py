"""Hard attention, which draws a location at every step (Sec. 4.1), and its relaxation by Gumbel noise."""

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from captioning.attention.base import Attention, AttentionOutput
from captioning.attention.memory import Memory, expected_context
from captioning.attention.normalizers import Normalizer
from captioning.attention.scores import Score
from captioning.errors import InputError, check_range
from captioning.trace import CONTEXT_MODES, NO_LOCATION


class StochasticAttention(Attention):
    """s_t ~ Multinoulli(alpha_t), Eq. 8. Subclasses define how a draw becomes the context in training.

    Draws come from torch's global generator.

    Args:
        score: Gives the logits.
        normalizer: Turns the logits into alphas; None for ``Softmax()``.
        sample_probability: Probability that an image's contexts are drawn in training; with a ramp, its highest value.
            Contexts that are not drawn are expectations. The paper has 0.5 (Sec. 4.1).
        ramp: Fractions of training, 0 to 1. With two, the probability rises linearly from 0 between them; with four,
            it also falls back to 0 between the last two. Empty for a constant probability, as in the paper. Early
            alphas are uninformative, and draws from them teach the decoder to ignore its context. Falling back at the
            end trains the decoder on the expectation that evaluation uses.
        per_batch: Whether all images of a batch share one decision, as in the authors' code.
        dropout: Probability of dropping a weight of an expectation in training, as in ``SoftAttention``. The
            weight of a drawn location is never dropped: the context would be 0, although a location was drawn.
        context_mode: "expected", "argmax" or "sample"; see ``Attention.context_mode``.
    """

    context_modes = CONTEXT_MODES

    def __init__(
        self,
        score: Score,
        *,
        normalizer: Normalizer | None = None,
        sample_probability: float = 0.5,
        ramp: tuple[float, ...] | None = (),
        per_batch: bool = False,
        dropout: float = 0.0,
        context_mode: str = "expected",
    ) -> None:
        super().__init__(score, normalizer=normalizer)
        check_range(0, 1, sample_probability=sample_probability)
        check_range(0, 0.99, dropout=dropout)
        self.ramp = ramp = tuple(ramp or ())  # null in a configuration takes back the ramp of another file
        if len(ramp) not in (0, 2, 4) or list(ramp) != sorted(ramp) or not all(0 <= fraction <= 1 for fraction in ramp):
            meaning = "0, 2 or 4 fractions of training (0 to 1, no numbers of batches) in ascending order"
            raise InputError(f"ramp must have {meaning}, got {list(ramp)}")
        self.sample_probability = sample_probability
        self.needs_progress = bool(ramp)
        self.per_batch = per_batch
        self.dropout = nn.Dropout(dropout)
        self.context_mode = context_mode

    @property
    def current_sample_probability(self) -> float:
        """Probability that the contexts of an image are drawn in this training batch."""
        if not self.ramp:
            return self.sample_probability
        fraction = np.interp(self.progress or 0.0, self.ramp, (0.0, 1.0, 1.0, 0.0)[: len(self.ramp)])
        return self.sample_probability * float(fraction)

    @property
    def may_draw(self) -> bool:
        return self.current_sample_probability > 0

    def logged_values(self) -> dict[str, float]:
        return {"sample_probability": self.current_sample_probability}

    def prepare(self, annotations: Tensor, mask: Tensor | None = None) -> Memory:
        memory = super().prepare(annotations, mask)
        if not self.training:
            return memory
        if self.needs_progress and self.progress is None:
            raise ValueError(f"{type(self).__name__}: set progress (0 to 1 of training) before each batch")
        probability = self.current_sample_probability
        decisions = annotations.new_zeros(1 if self.per_batch else len(annotations), dtype=torch.float32)
        uniform = decisions if probability == 1 else torch.rand_like(decisions)  # with 1, no random numbers are taken
        return replace(memory, drawn=uniform.expand(len(annotations)) < probability)

    def select(self, alphas: Tensor, log_alphas: Tensor, memory: Memory) -> AttentionOutput:
        if self.training:
            return self.train_select(alphas, log_alphas, memory)
        if self.context_mode == "expected":
            expectation = expected_context(alphas, memory.annotations)
            return AttentionOutput(expectation, alphas, location_log_prob=torch.zeros_like(alphas[..., 0]))
        locations = alphas.argmax(-1) if self.context_mode == "argmax" else draw(alphas)  # (B, R)
        return select_at(alphas, log_alphas, locations, memory)

    @abstractmethod
    def train_select(self, alphas: Tensor, log_alphas: Tensor, memory: Memory) -> AttentionOutput:
        """Return the contexts of a training batch, as ``select`` does."""

    def select_mixed(
        self, alphas: Tensor, log_alphas: Tensor, locations: Tensor, memory: Memory, relaxed: Tensor | None = None
    ) -> AttentionOutput:
        """Return annotations at ``locations`` (B, R) for images that ``memory.drawn`` marks, expectations for others.

        The weights of a drawn context are one-hot; with ``relaxed`` (B, R, L), they have its gradient.
        """
        one_hot = torch.zeros_like(alphas.detach()).scatter_(-1, locations.unsqueeze(-1), 1.0)  # (B, R, L)
        if relaxed is not None:
            one_hot = one_hot + (relaxed - relaxed.detach())
        assert memory.drawn is not None  # in training
        drawn = memory.drawn.unsqueeze(1)  # (B, 1)
        weights = torch.where(drawn.unsqueeze(2), one_hot, self.dropout(alphas))  # (B, R, L)
        return AttentionOutput(
            expected_context(weights, memory.annotations),
            alphas,
            locations.masked_fill(~drawn, NO_LOCATION),
            _log_prob(log_alphas, locations).masked_fill(~drawn, 0.0),
        )


class HardAttention(StochasticAttention):
    """z_t = sum_i s_ti a_i with one-hot s_t, Eq. 8-9, trained by REINFORCE with an ``objective.Estimator``.

    A drawn context passes no gradient to the alphas; ``AttentionOutput.location_log_prob`` does. With a sparse
    normalizer, locations outside the support are never drawn.
    """

    needs_estimator = True

    def train_select(self, alphas: Tensor, log_alphas: Tensor, memory: Memory) -> AttentionOutput:
        locations = draw(alphas.detach())  # (B, R), Eq. 8
        if self.current_sample_probability == 1:  # without expectations, no sum over L is needed
            return select_at(alphas, log_alphas, locations, memory)
        return self.select_mixed(alphas, log_alphas, locations, memory)


class GumbelAttention(StochasticAttention):
    """Straight-through Gumbel-softmax (Jang et al. 2017; Maddison et al. 2017), the control without REINFORCE.

    The context is the annotation of a drawn location, as in ``HardAttention``. The backward pass differentiates the
    relaxed draw softmax((log alpha + g) / temperature) with Gumbel noise g instead. The gradient is biased: as the
    temperature falls, the bias falls and the variance grows.

    Args:
        score: Gives the logits.
        temperature: Temperature at the beginning of training. It decays exponentially to half of this value at the end.
        sample_probability: As in ``StochasticAttention``, but all contexts are drawn by default.
        options: The other arguments of ``StochasticAttention``.
    """

    def __init__(
        self, score: Score, *, temperature: float = 1.0, sample_probability: float = 1.0, **options: Any
    ) -> None:
        super().__init__(score, sample_probability=sample_probability, **options)
        check_range(1e-6, temperature=temperature)
        self.first_temperature = temperature
        self.needs_progress = True  # for the temperature

    @property
    def temperature(self) -> float:
        """Temperature of this training batch."""
        return self.first_temperature * 0.5 ** min(self.progress or 0.0, 1.0)

    def logged_values(self) -> dict[str, float]:
        return super().logged_values() | {"temperature": self.temperature}

    def train_select(self, alphas: Tensor, log_alphas: Tensor, memory: Memory) -> AttentionOutput:
        gumbel = -torch.empty_like(alphas).exponential_().log()
        relaxed = torch.softmax((log_alphas + gumbel) / self.temperature, dim=-1)  # (B, R, L)
        return self.select_mixed(alphas, log_alphas, relaxed.argmax(dim=-1), memory, relaxed)


def draw(alphas: Tensor) -> Tensor:
    """Return indices (..): one location drawn from each row of alphas (.., L), never one whose alpha is 0."""
    # The exponential clock with rate alpha_i rings first with probability alpha_i. torch.multinomial has the
    # same distribution, but waits for the device to check its input.
    return (alphas / torch.empty_like(alphas).exponential_()).argmax(dim=-1)


def select_at(alphas: Tensor, log_alphas: Tensor, locations: Tensor, memory: Memory) -> AttentionOutput:
    """Return the annotation at each row's location, ``locations`` (B, R), as its context, without a sum over L."""
    images = torch.arange(locations.shape[0], device=locations.device).unsqueeze(1)
    return AttentionOutput(memory.annotations[images, locations], alphas, locations, _log_prob(log_alphas, locations))


def _log_prob(log_alphas: Tensor, locations: Tensor) -> Tensor:
    """Return the log-probability in nats of every row's location, (B, R)."""
    return log_alphas.gather(-1, locations.unsqueeze(-1)).squeeze(-1)
