"""The terms of the likelihood objective, one small class each: Eq. 11-14 of Xu et al. 2015."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from captioning.attention import Memory
from captioning.attention.memory import repeat_rows
from captioning.component import Component
from captioning.data.batch import CaptionBatch
from captioning.errors import check_range
from captioning.model import Captioner, DecoderOutput
from captioning.objective.estimators import Estimator, Signal
from captioning.objective.processes import sum_over_processes
from captioning.objective.reductions import Reduction, step_entropy, step_log_probs


@dataclass(frozen=True)
class ForcedBatch:
    """One training batch after teacher forcing, as every term sees it.

    Attributes:
        captioner: The model, in training mode.
        batch: The captions, N / samples of them.
        memory: The memory of the batch's images.
        output: The decoder's output for N captions, the samples of a caption adjacent.
        samples: How many times each caption was decoded.
        reduction: How terms are averaged.
    """

    captioner: Captioner
    batch: CaptionBatch
    memory: Memory
    output: DecoderOutput
    samples: int
    reduction: Reduction

    @property
    def image_index(self) -> Tensor:
        """(N,) int64, the image of every caption of the output."""
        return repeat_rows(self.batch.image_index, self.samples)


class Term(Component):
    """One term of the objective.

    Attributes:
        reported: Whether the value is part of ``train/loss``. Of a surrogate only the gradient is meaningful.
    """

    reported = True

    @abstractmethod
    def forward(self, forced: ForcedBatch) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the term, a scalar to be added to the loss, and the values to log by name.

        The term is None in a batch that it does not apply to.
        """


class NLL(Term):
    """-log p(y | a). With drawn locations it is -log p(y | s, a), one draw of the bound L_s (Eq. 10).

    Args:
        label_smoothing: Fraction of the target probability that is spread over the vocabulary.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        check_range(0, 0.99, label_smoothing=label_smoothing)
        self.label_smoothing = label_smoothing

    def forward(self, forced: ForcedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        out = forced.output
        nll = forced.reduction.nll(out.logits, out.targets, out.mask, label_smoothing=self.label_smoothing)
        return nll, {"nll": nll}


class DoublyStochasticPenalty(Term):
    """lambda sum_i (1 - sum_t alpha_ti)^2, Eq. 14: over a caption, every location should get a weight of 1.

    Args:
        weight: lambda; ``reductions.doubly_stochastic_penalty`` gives the exact reduction.
    """

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        check_range(0, attention_penalty=weight)
        self.weight = weight

    def forward(self, forced: ForcedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        mask = None if forced.memory.mask is None else forced.memory.mask[forced.image_index]  # (N, L)
        stochastic = forced.output.log_prob is not None
        penalty = forced.reduction.penalty(forced.output.trace.alphas, mask, stochastic=stochastic)
        return self.weight * penalty, {"attention_penalty": penalty}


class Entropy(Term):
    """-lambda_e H[s] of the learning rule below Eq. 12: stochastic attention should keep exploring.

    Args:
        weight: lambda_e.
    """

    def __init__(self, weight: float = 0.002) -> None:
        super().__init__()
        check_range(0, entropy_weight=weight)
        self.weight = weight

    def forward(self, forced: ForcedBatch) -> tuple[Tensor | None, dict[str, Tensor]]:
        if forced.output.log_prob is None:  # attention that never draws
            return None, {}
        entropy = forced.reduction.over_steps(step_entropy(forced.output.trace.alphas), forced.output.mask)
        return -(self.weight * entropy), {}


class Reinforce(Term):
    """-lambda_r (log p(y | s, a) - b) log p(s | a), whose gradient is that of the learning rule below Eq. 12.

    Args:
        estimator: The return of a draw, and its baseline b.
        weight: lambda_r; 1 gives the gradient of the bound L_s.
    """

    reported = False

    def __init__(self, estimator: Estimator, weight: float = 1.0) -> None:
        super().__init__()
        check_range(-math.inf, reward_weight=weight)
        self.estimator = estimator
        self.weight = weight

    def forward(self, forced: ForcedBatch) -> tuple[Tensor | None, dict[str, Tensor]]:
        if not forced.captioner.decoder.attention.draws:
            return None, {}
        signal, log_prob = self.signal(forced), forced.output.log_prob
        assert log_prob is not None
        credit = forced.reduction.over_steps(signal.advantages * log_prob, forced.output.mask)
        return -(self.weight * credit), _means(signal)

    def signal(self, forced: ForcedBatch) -> Signal:
        """Return the learning signal of the draws."""
        mask, use_expectation = forced.output.mask, forced.memory.use_expectation
        rewards = step_log_probs(forced.output.logits, forced.output.targets, mask)
        sampled = torch.ones_like(mask[:, 0])
        if use_expectation is not None:
            sampled = ~use_expectation[forced.image_index]
        reference = None
        if self.estimator.reference is not None:
            with torch.no_grad(), forced.captioner.decoder.attention.inferring(self.estimator.reference):
                other = forced.captioner.teacher_force(forced.batch, forced.memory)
            reference = step_log_probs(other.logits, other.targets, other.mask)
        return self.estimator(rewards, mask, sampled, reference)


def _means(signal: Signal) -> dict[str, Tensor]:
    """Return means over the drawn steps of all processes, in nats; nan if nothing was drawn. "reward" is the return."""
    count = signal.drawn.sum()
    sums = [(values * signal.drawn).sum() for values in (signal.returns, signal.baseline, signal.advantages)]
    *totals, count = sum_over_processes(torch.stack([*sums, count]))
    reward, baseline, advantage = (total / count for total in totals)
    squares = sum_over_processes(((signal.advantages - advantage) ** 2 * signal.drawn).sum())
    return {"reward": reward, "baseline": baseline, "advantage_std": (squares / count).sqrt()}
