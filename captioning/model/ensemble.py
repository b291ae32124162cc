"""Several captioners of one vocabulary that caption an image together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from captioning.attention import Memory
from captioning.data.batch import CaptionBatch
from captioning.data.transforms import Preprocessing
from captioning.decoding import Hypothesis, ImageStepFunction, Step
from captioning.encoders import Encoder
from captioning.errors import InputError
from captioning.model.captioner import Captioner, CaptionModel
from captioning.model.decoder import DecoderOutput
from captioning.trace import EXPECTATION, AttentionTrace, State

Memories = tuple[Memory, ...]
"""Of the members, in their order."""


class Ensemble(CaptionModel):
    """Captioners whose word distributions are averaged at every step of a search.

    Any mixture of attentions, outputs and encoders over one vocabulary. The trace is the mean of those members that
    look at the same cells of the same view as the first; it has no posterior.

    Args:
        members: the first one's encoder has the say where views and batches are made.
        load: returns the images (B, 3, height, width) of rows (B,) of the split being evaluated. Needed for batches
            alone, where a member's encoder computes something else than the first one's.
    """

    encoder: Encoder

    def __init__(
        self, members: Sequence[Captioner], *, load: Callable[[Tensor, Preprocessing], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.encoder = members[0].encoder
        # Those whose traces are averaged come first; a mean does not depend on the order.
        self.captioners = sorted(members, key=lambda member: not _same_view(member.encoder, self.encoder))
        self.members = torch.nn.ModuleList(self.captioners)
        self.traced = sum(_same_view(member.encoder, self.encoder) for member in members)
        self.load = load
        self._encoders: list[Encoder] = []
        self._encoder_of: list[int] = []
        """Which of the different encoders a member uses."""
        identities: list[dict] = []
        for member in self.captioners:
            identity = member.encoder.identity()
            if identity not in identities:
                identities.append(identity)
                self._encoders.append(member.encoder)
            self._encoder_of.append(identities.index(identity))

    @property
    def preprocessings(self) -> list[Preprocessing]:
        found: list[Preprocessing] = []
        for encoder in self._encoders:
            if encoder.preprocessing not in found:
                found.append(encoder.preprocessing)
        return found

    def encode_views(self, views: Sequence[Tensor]) -> Memories:
        known = self.preprocessings
        return self._memories([encoder(views[known.index(encoder.preprocessing)]) for encoder in self._encoders])

    def encode_batch(self, batch: CaptionBatch) -> Memories:
        """Return the memories of a batch's images.

        Cached features are those of the first member's encoder; for other encoders the images are loaded.
        """
        first, *others = self._encoders
        annotations = [batch.annotations if batch.annotations is not None else first(batch.images)]
        views = {} if batch.images is None else {first.preprocessing: batch.images}
        for encoder in others:
            if encoder.preprocessing not in views:
                if self.load is None:
                    raise ValueError("members with different encoders need a function that loads images")
                views[encoder.preprocessing] = self.load(batch.rows, encoder.preprocessing).to(batch.captions.device)
            annotations.append(encoder(views[encoder.preprocessing]))
        return self._memories(annotations, batch.annotation_mask)

    def _memories(self, annotations: list[Tensor], mask: Tensor | None = None) -> Memories:
        """Args:
        annotations: of the different encoders.
        mask: of the first encoder's annotations.
        """
        return tuple(
            member.encode(annotations=annotations[number], mask=mask if number == 0 else None)
            for member, number in zip(self.captioners, self._encoder_of, strict=True)
        )

    def teacher_force(self, batch: CaptionBatch, memory: Memories) -> DecoderOutput:
        """``logits`` are the logarithms of the mean distribution."""
        found = [member.teacher_force(batch, own) for member, own in zip(self.captioners, memory, strict=True)]
        logits = mean_log_probs([torch.log_softmax(each.logits.float(), dim=-1) for each in found])
        trace = mean_trace([each.trace for each in found[: self.traced]])._replace(posterior=None)
        return replace(found[0], logits=logits, trace=trace, selection_log_probs=None)

    def stepper(self, memory: Memories) -> ImageStepFunction:
        each = list(zip(self.captioners, memory, strict=True))
        sizes = [len(member.init_state(own)) for member, own in each]
        return MeanStep([member.stepper(own) for member, own in each], sizes, traced=self.traced)

    def init_state(self, memory: Memories) -> State:
        states = (member.init_state(own) for member, own in zip(self.captioners, memory, strict=True))
        return tuple(part for state in states for part in state)

    @contextmanager
    def inferring(self, mode: str | None) -> Iterator[None]:
        """Members that do not know the mode go on as they are; one of them must know it."""
        knowing = [member for member in self.captioners if mode in member.decoder.attention.inference_modes]
        if mode is not None and not knowing:
            raise InputError(f"inference: no model of the ensemble knows {mode!r}")
        with ExitStack() as stack:
            for member in knowing:
                stack.enter_context(member.inferring(mode))
            yield

    def with_posterior(self, memory: Memories, found: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
        return found


def _same_view(one: Encoder, other: Encoder) -> bool:
    """Whether the encoders' locations are the same places of the same view; trained ones differ by a little."""
    a, b = one.preprocessing, other.preprocessing
    return (a.resize, a.crop) == (b.resize, b.crop) and one.cells.near(other.cells)


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
