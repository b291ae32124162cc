"""Several captioners of one vocabulary that caption an image together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from captioning.attention import Memory
from captioning.data.batch import CaptionBatch
from captioning.data.transforms import Preprocessing
from captioning.decoding import Hypothesis, ImageStepFunction, MeanStep, State, mean_log_probs, mean_trace
from captioning.encoders import Encoder
from captioning.errors import InputError
from captioning.model.captioner import Captioner, CaptionModel
from captioning.model.decoder import DecoderOutput

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
        return replace(found[0], logits=logits, trace=trace, selection_log_probs=None, drawn=None)

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
