"""What training minimises: Eq. 14 for every attention, and Eq. 11-12 where locations are drawn."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from captioning.attention.base import Attention, Memory
from captioning.data.batch import CaptionBatch
from captioning.errors import InputError, check_range
from captioning.model import DecoderOutput, Output
from captioning.model.captioner import Captioner
from captioning.objective import terms as losses
from captioning.objective.estimators import Estimator, ExpectedContext, MovingAverage, Signal
from captioning.objective.processes import Shares, summed


class Objective(nn.Module):
    """The NLL of the captions, the penalty on alphas, and where locations are drawn the terms of the bound.

    ``CaptioningModule`` describes the arguments. Locations are drawn by stochastic ``attention``, or by the ``output``.

    Raises:
        InputError: an estimator or a weight for attention that it has no effect on.
    """

    def __init__(
        self,
        attention: Attention,
        output: Output | None = None,
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
        self._output_draws = output is not None and output.draws
        draws = attention.needs_estimator or self._output_draws
        if estimator is not None and not draws:
            given, name = type(estimator).__name__, type(attention).__name__
            raise InputError(f"estimator: {name} passes its gradient on by itself; leave {given} out")
        if estimator is not None and self._output_draws and estimator.reference == "argmax":
            given, name = type(estimator).__name__, type(output).__name__
            raise InputError(f"estimator: {name} knows the expected context alone, not {given}'s; use ExpectedContext")
        if reward_weight != 1.0 and not draws:
            raise InputError(f"reward_weight: has no effect with {type(attention).__name__}; leave it out")
        if entropy_weight != 0.002 and "sample" not in attention.inference_modes:
            raise InputError(f"entropy_weight: has no effect with {type(attention).__name__}; leave it out")
        check_range(0, attention_penalty=attention_penalty, entropy_weight=entropy_weight, r_drop=r_drop)
        check_range(0, 0.99, label_smoothing=label_smoothing)
        check_range(-math.inf, reward_weight=reward_weight)
        check_range(1, rows_per_caption=rows_per_caption)
        if rows_per_caption > 1 and attention.needs_estimator:
            raise InputError("rows_per_caption: hard attention's rows are its estimator's `samples`; leave it out")
        if estimator is None and draws:
            estimator = ExpectedContext() if self._output_draws else MovingAverage()
        samples = 1 if estimator is None else estimator.samples
        if samples > 1 and rows_per_caption not in (1, samples):
            raise InputError(f"rows_per_caption: the estimator draws {samples} rows of a caption; leave it out")
        self.estimator = estimator
        self.reward_weight = reward_weight
        self.entropy_weight = entropy_weight
        self.attention_penalty = attention_penalty
        self.reduction = reduction or losses.Reduction()
        self.label_smoothing = label_smoothing
        self.rows_per_caption = max(rows_per_caption, samples)
        if r_drop and self.rows_per_caption < 2:
            where = "`rows_per_caption: 2`" if self.estimator is None else "an estimator with `samples: 2`"
            raise InputError(f"r_drop: compares rows of the same caption, of which there is one; set {where}")
        self.r_drop = r_drop

    def forward(self, captioner: Captioner, batch: CaptionBatch) -> tuple[Tensor, dict[str, Tensor], DecoderOutput]:
        """Return what to differentiate, the terms it is made of by name, detached, and the decoder's output.

        The term "loss" leaves REINFORCE out: that term's gradient has a meaning, its value has none. Where several
        processes train, loss and terms are to be averaged over them, which gives those of their batches as one.
        """
        # All rows also where nothing is drawn yet: each has a dropout mask of its own, which helps by itself.
        samples = self.rows_per_caption
        draws = captioner.decoder.attention.draws  # for this batch; encoding counts it
        memory = captioner.encode(batch.images, batch.annotations, batch.annotation_mask)
        output = captioner.teacher_force(batch, memory, samples)
        drawn = output.selection_log_probs
        images = batch.image_index.repeat_interleave(samples)  # (N,), of the output's rows
        mask = None if memory.mask is None else memory.mask[images]
        reduction = self.reduction
        if (shares := Shares.of(output.mask)) is not None:
            reduction = losses.SharedReduction(reduction, shares)
        nll = reduction.nll(output.logits, output.targets, output.mask, label_smoothing=self.label_smoothing)
        penalty = reduction.penalty(output.trace.alphas, mask, drawn=drawn is not None)
        loss = nll + self.attention_penalty * penalty  # Eq. 14
        if drawn is not None:
            entropy = reduction.steps(losses.step_entropy(output.trace.alphas), output.mask)
            loss = loss - self.entropy_weight * entropy  # lambda_e d H[s]
        parts = {"nll": nll, "attention_penalty": penalty}
        if self.r_drop:
            divergence = losses.row_divergence(output.logits, output.mask, samples)
            parts["r_drop"] = reduction.steps(divergence, output.mask[::samples])
            loss = loss + self.r_drop * parts["r_drop"]
        if output.drawn is not None:
            parts["divergence"] = reduction.steps(output.drawn.divergence, output.mask)
            loss = loss + parts["divergence"]
        terms = {name: part.detach() for name, part in ({"loss": loss} | parts).items()}
        if self.estimator is not None and (draws or output.drawn is not None):
            signal, log_probs = self._credit(captioner, batch, memory, output)
            # lambda_r (log p(y | s, a) - b) d log p(s | a)
            loss = loss - self.reward_weight * reduction.steps(signal.advantages * log_probs, output.mask)
            terms |= _means(signal)
        return loss, terms, output

    def _credit(
        self, captioner: Captioner, batch: CaptionBatch, memory: Memory, output: DecoderOutput
    ) -> tuple[Signal, Tensor]:
        """Return the learning signal of the draws and their log-probabilities, (N, T) each."""
        estimator, mask = self.estimator, output.mask
        assert estimator is not None
        rewards = losses.step_log_probs(output.logits, output.targets, mask)
        if output.drawn is not None:
            # What the output draws is the context of one word alone: every step is an episode of its own.
            rows = estimator.samples

            def episodes(steps: Tensor) -> Tensor:  # draws of the same step adjacent
                return steps.unflatten(0, (-1, rows)).transpose(1, 2).reshape(-1, 1)

            def by_caption(steps: Tensor) -> Tensor:
                return steps.view(len(mask) // rows, mask.shape[1], rows).transpose(1, 2).flatten(0, 1)

            exists = episodes(mask)
            signal = estimator(episodes(rewards), exists, exists[:, 0], episodes(output.drawn.expected))
            return Signal(*map(by_caption, signal)), output.drawn.log_prob
        assert output.selection_log_probs is not None
        images = batch.image_index.repeat_interleave(self.rows_per_caption)
        sampled = torch.ones_like(mask[:, 0]) if memory.expected is None else ~memory.expected[images]
        reference = None
        if estimator.reference is not None:
            with torch.no_grad(), captioner.decoder.attention.inferring(estimator.reference):
                other = captioner.teacher_force(batch, memory)
            reference = losses.step_log_probs(other.logits, other.targets, other.mask)
        return estimator(rewards, mask, sampled, reference), output.selection_log_probs


def _means(signal: Signal) -> dict[str, Tensor]:
    """Return means over the steps of all processes whose location was drawn, in nats; nan in a batch without any."""
    count = signal.drawn.sum()
    sums = [(values * signal.drawn).sum() for values in (signal.returns, signal.baseline, signal.advantages)]
    *totals, count = summed(torch.stack([*sums, count]))
    reward, baseline, advantage = (total / count for total in totals)
    squares = summed(((signal.advantages - advantage) ** 2 * signal.drawn).sum())
    return {"reward": reward, "baseline": baseline, "advantage_std": (squares / count).sqrt()}


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
