"""What training minimises: Eq. 14 for every attention, and Eq. 11-12 where locations are drawn."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from captioning.attention.base import Attention, Memory
from captioning.data.batch import CaptionBatch
from captioning.decoder import DecoderOutput
from captioning.errors import InputError, check_range
from captioning.model import Captioner
from captioning.objective import losses
from captioning.objective.estimators import Estimator, MovingAverage, Signal


class Objective(nn.Module):
    """The NLL of the captions, the penalty on alphas, and for stochastic attention the terms of the bound L_s.

    ``CaptioningModule`` describes the arguments.

    Raises:
        InputError: an estimator or a weight for attention that it has no effect on.
    """

    def __init__(
        self,
        attention: Attention,
        *,
        estimator: Estimator | None = None,
        reward_weight: float = 1.0,
        entropy_weight: float = 0.002,
        attention_penalty: float = 1.0,
        reduction: losses.Reduction | None = None,
        label_smoothing: float = 0.0,
        rows_per_caption: int = 1,
        r_drop: float = 0.0,
    ) -> None:
        super().__init__()
        if estimator is not None and not attention.needs_estimator:
            given, name = type(estimator).__name__, type(attention).__name__
            raise InputError(f"estimator: {name} passes its gradient on by itself; leave {given} out")
        if reward_weight != 1.0 and not attention.needs_estimator:
            raise InputError(f"reward_weight: has no effect with {type(attention).__name__}; leave it out")
        if entropy_weight != 0.002 and "sample" not in attention.inference_modes:
            raise InputError(f"entropy_weight: has no effect with {type(attention).__name__}; leave it out")
        check_range(0, attention_penalty=attention_penalty, entropy_weight=entropy_weight, r_drop=r_drop)
        check_range(0, 0.99, label_smoothing=label_smoothing)
        check_range(-math.inf, reward_weight=reward_weight)
        check_range(1, rows_per_caption=rows_per_caption)
        if rows_per_caption > 1 and attention.needs_estimator:
            raise InputError("rows_per_caption: hard attention's rows are its estimator's `samples`; leave it out")
        self.estimator = MovingAverage() if estimator is None and attention.needs_estimator else estimator
        self.reward_weight = reward_weight
        self.entropy_weight = entropy_weight
        self.attention_penalty = attention_penalty
        self.reduction = reduction or losses.Reduction()
        self.label_smoothing = label_smoothing
        self.rows_per_caption = rows_per_caption if self.estimator is None else self.estimator.samples
        if r_drop and self.rows_per_caption < 2:
            where = "`rows_per_caption: 2`" if self.estimator is None else "an estimator with `samples: 2`"
            raise InputError(f"r_drop: compares rows of the same caption, of which there is one; set {where}")
        self.r_drop = r_drop

    def forward(self, captioner: Captioner, batch: CaptionBatch) -> tuple[Tensor, dict[str, Tensor], DecoderOutput]:
        """Return what to differentiate, the terms it is made of by name, detached, and the decoder's output.

        The term "loss" leaves REINFORCE out: that term's gradient has a meaning, its value has none.
        """
        # All rows also where nothing is drawn yet: each has a dropout mask of its own, which helps by itself.
        samples = self.rows_per_caption
        estimator = self.estimator if captioner.decoder.attention.draws else None
        memory = captioner.encode(batch.images, batch.annotations, batch.annotation_mask)
        output = captioner.teacher_force(batch, memory, samples)
        drawn = output.selection_log_probs
        images = batch.image_index.repeat_interleave(samples)  # (N,), of the output's rows
        mask = None if memory.mask is None else memory.mask[images]
        nll = self.reduction.nll(output.logits, output.targets, output.mask, label_smoothing=self.label_smoothing)
        penalty = self.reduction.penalty(output.trace.alphas, mask, drawn=drawn is not None)
        loss = nll + self.attention_penalty * penalty  # Eq. 14
        if drawn is not None:
            entropy = self.reduction.steps(losses.step_entropy(output.trace.alphas), output.mask)
            loss = loss - self.entropy_weight * entropy  # lambda_e d H[s]
        parts = {"nll": nll, "attention_penalty": penalty}
        if self.r_drop:
            divergence = losses.row_divergence(output.logits, output.mask, samples)
            parts["r_drop"] = self.reduction.steps(divergence, output.mask[::samples])
            loss = loss + self.r_drop * parts["r_drop"]
        terms = {name: part.detach() for name, part in ({"loss": loss} | parts).items()}
        if estimator is not None:
            assert drawn is not None
            sampled = torch.ones_like(output.mask[:, 0]) if memory.expected is None else ~memory.expected[images]
            rewards = losses.step_log_probs(output.logits, output.targets, output.mask)
            greedy = self._greedy_rewards(captioner, batch, memory) if estimator.needs_greedy else None
            signal = estimator(rewards, output.mask, sampled, greedy)
            # lambda_r (log p(y | s, a) - b) d log p(s | a)
            loss = loss - self.reward_weight * self.reduction.steps(signal.advantages * drawn, output.mask)
            terms |= _means(signal)
        return loss, terms, output

    @torch.no_grad()
    def _greedy_rewards(self, captioner: Captioner, batch: CaptionBatch, memory: Memory) -> Tensor:
        """Return log p(y_t) where attention takes the most probable location at every step, (N, T)."""
        with captioner.decoder.attention.inferring("argmax"):
            output = captioner.teacher_force(batch, memory)
        return losses.step_log_probs(output.logits, output.targets, output.mask)


def _means(signal: Signal) -> dict[str, Tensor]:
    """Return means over the steps whose location was drawn, in nats; nan in a batch without any."""
    count = signal.drawn.sum()

    def mean(values: Tensor) -> Tensor:
        return (values * signal.drawn).sum() / count

    advantage = mean(signal.advantages)
    return {
        "reward": mean(signal.returns),
        "baseline": mean(signal.baseline),
        "advantage_std": mean((signal.advantages - advantage) ** 2).sqrt(),
    }


class Bounds(NamedTuple):
    """Lower bounds on log p(y | a) in nats, summed over captions."""

    bound: float
    """L_s = E_s[log p(y | s, a)], Eq. 10."""
    importance_weighted: float
    """E[log 1/S sum_k p(y | s_k, a)] (Burda et al. 2016): at least L_s, and the tighter the more draws."""


@torch.no_grad()
def sampled_bounds(captioner: Captioner, batch: CaptionBatch, memory: Memory, samples: int) -> Bounds:
    """Estimate both bounds for the captions of a batch with S draws of every caption's locations.

    Draws come from p(s | a) itself, so that the importance weights are the p(y | s, a) alone.
    """
    draws = []
    with captioner.decoder.attention.inferring("sample"):
        for _ in range(samples):  # one after the other: the logits of all draws at once would fill the memory
            output = captioner.teacher_force(batch, memory)
            draws.append(losses.step_log_probs(output.logits, output.targets, output.mask).sum(dim=1))
    log_probs = torch.stack(draws).double()  # (S, N)
    tighter = log_probs.logsumexp(dim=0) - math.log(samples)
    return Bounds(float(log_probs.mean(dim=0).sum()), float(tighter.sum()))
