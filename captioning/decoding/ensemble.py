"""Several step functions that choose the words of one caption together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from captioning.decoding.step import ImageStepFunction, State, Step
from captioning.trace import EXPECTATION, AttentionTrace


class MeanStep:
    """A step function whose word distribution is the mean of several, over the same words.

    Its state is the states of all, one after the other.

    Args:
        steps: over the same images.
        state_sizes: how many tensors the state of each has.
        traced: how many of the first ones look at the same locations; the trace is the mean of theirs.
    """

    def __init__(self, steps: Sequence[ImageStepFunction], state_sizes: Sequence[int], *, traced: int = 1) -> None:
        self.steps = list(steps)
        self.state_sizes = list(state_sizes)
        self.traced = traced
        self.images = steps[0].images

    def __call__(self, tokens: Tensor, state: State) -> Step:
        parts = iter(state)
        states = [tuple(itertools.islice(parts, size)) for size in self.state_sizes]
        found = [step(tokens, own) for step, own in zip(self.steps, states, strict=True)]
        return Step(
            mean_log_probs([each.log_probs for each in found]),
            tuple(part for each in found for part in each.state),
            mean_trace([each.trace for each in found[: self.traced]]),
        )

    def select(self, images: Tensor) -> MeanStep:
        return MeanStep([step.select(images) for step in self.steps], self.state_sizes, traced=self.traced)


def mean_log_probs(log_probs: Sequence[Tensor]) -> Tensor:
    """Return log of the mean of several distributions (.., V) in nats.

    The mean of the probabilities, not of their logarithms: it is the distribution of a mixture whose components are
    equally likely, sums to one as it is, and no model can veto a word that the others are sure of.
    """
    total = log_probs[0]
    for other in log_probs[1:]:
        total = torch.logaddexp(total, other)
    return total - math.log(len(log_probs)) if len(log_probs) > 1 else total


def mean_trace(traces: Sequence[AttentionTrace]) -> AttentionTrace:
    """Return the mean alphas and betas of models that look at the same locations; of one, its trace as it is.

    The mean of several is an expectation, also where each of them took its context from a single location. It has
    betas if all models have a gate.
    """
    first, *others = traces
    if not others:
        return first
    gates = [trace.betas for trace in traces]
    return AttentionTrace(
        torch.stack([trace.alphas.float() for trace in traces]).mean(0),
        None if any(gate is None for gate in gates) else torch.stack([gate.float() for gate in gates]).mean(0),
        torch.full_like(first.locations, EXPECTATION),
    )
