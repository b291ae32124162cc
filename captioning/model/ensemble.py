"""Several captioners of one vocabulary that caption an image together."""

from __future__ import annotations

import functools
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
from captioning.decoding import Step, StepFunction
from captioning.encoders import Encoder
from captioning.errors import InputError
from captioning.model.captioner import Captioner, CaptionModel
from captioning.model.decoder import DecoderOutput
from captioning.trace import State

Memories = tuple[Memory, ...]
"""The memories of the members, in their order."""


class Ensemble(CaptionModel):
    """Captioners whose word distributions are averaged at every step of a search.

    Members may differ in attention, output and encoder, but share one vocabulary. The trace is the first member's,
    without evidence.

    Args:
        members: The captioners. The first member's encoder determines views and batches.
        load_images: Takes row numbers (B,) of the evaluated split and a preprocessing, and returns images (B, 3,
            height, width). ``encode_batch`` needs it if the encoders differ.
    """

    def __init__(
        self, members: Sequence[Captioner], *, load_images: Callable[[Tensor, Preprocessing], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.encoder, self.load_images = members[0].encoder, load_images
        self.members: Sequence[Captioner] = torch.nn.ModuleList(members)  # type: ignore[assignment]
        identities = [member.encoder.identity() for member in members]
        self._first_with_encoder = [identities.index(identity) for identity in identities]

    @property
    def preprocessings(self) -> list[Preprocessing]:
        return list(dict.fromkeys(member.encoder.preprocessing for member in self.members))

    def encode_views(self, views: Sequence[Tensor]) -> Memories:
        views_by_preprocessing = dict(zip(self.preprocessings, views, strict=True))
        return self._encode(lambda encoder: encoder(views_by_preprocessing[encoder.preprocessing]))

    def encode_batch(self, batch: CaptionBatch) -> Memories:
        """Return the memories of a batch's images.

        Cached features are for the first member's encoder. Other encoders take the batch's images, or load their own.
        """

        def annotations_of(encoder: Encoder) -> Tensor:
            if encoder is self.encoder and batch.annotations is not None:
                return batch.annotations
            if batch.images is not None and encoder.preprocessing == self.encoder.preprocessing:
                return encoder(batch.images)
            if self.load_images is None:
                raise ValueError("members with different encoders need a function that loads images")
            return encoder(self.load_images(batch.index_rows, encoder.preprocessing).to(batch.captions.device))

        return self._encode(annotations_of, batch.annotation_mask)

    def _encode(self, annotations_of: Callable[[Encoder], Tensor], mask: Tensor | None = None) -> Memories:
        """Return the members' memories. Every encoder runs once; ``mask`` is for the first member's annotations."""
        annotations = {n: annotations_of(self.members[n].encoder) for n in dict.fromkeys(self._first_with_encoder)}
        return tuple(
            member.encode(annotations=annotations[n], mask=mask if n == 0 else None)
            for member, n in zip(self.members, self._first_with_encoder, strict=True)
        )

    def teacher_force(self, batch: CaptionBatch, memory: Memories) -> DecoderOutput:
        """``logits`` are the logarithms of the mean distribution."""
        outputs = [member.teacher_force(batch, memory[n]) for n, member in enumerate(self.members)]
        logits = mean_log_probs([torch.log_softmax(output.logits.float(), dim=-1) for output in outputs])
        return replace(outputs[0], logits=logits)

    def step_function(self, memory: Memories) -> StepFunction:
        step_functions = [member.step_function(memory[n]) for n, member in enumerate(self.members)]
        sizes = [len(member.init_state(memory[n])) for n, member in enumerate(self.members)]
        return MeanStepFunction(step_functions, sizes)

    def init_state(self, memory: Memories) -> State:
        return tuple(tensor for n, member in enumerate(self.members) for tensor in member.init_state(memory[n]))

    @contextmanager
    def in_context_mode(self, mode: str | None) -> Iterator[None]:
        """Use the mode in every member that knows it; the others keep their own. At least one must know it."""
        with_mode = [member for member in self.members if mode in member.decoder.attention.context_modes]
        if mode is not None and not with_mode:
            raise InputError(f"context_mode: no model of the ensemble knows {mode!r}")
        with ExitStack() as stack:
            for member in with_mode:
                stack.enter_context(member.in_context_mode(mode))
            yield


class MeanStepFunction:
    """A step function that averages the word distributions of several members.

    Its state has the members' states one after the other; ``state_sizes`` are their numbers of tensors.
    """

    def __init__(self, members: Sequence[StepFunction], state_sizes: Sequence[int]) -> None:
        self.members, self.state_sizes = members, state_sizes
        self.image_count = members[0].image_count

    def __call__(self, tokens: Tensor, state: State) -> Step:
        tensors = iter(state)
        states = [tuple(itertools.islice(tensors, size)) for size in self.state_sizes]
        outputs = [member(tokens, member_state) for member, member_state in zip(self.members, states, strict=True)]
        return Step(
            mean_log_probs([output.log_probs for output in outputs]),
            tuple(tensor for output in outputs for tensor in output.state),
            outputs[0].trace,
        )

    def select_images(self, images: Tensor) -> MeanStepFunction:
        return MeanStepFunction([member.select_images(images) for member in self.members], self.state_sizes)


def mean_log_probs(log_probs: Sequence[Tensor]) -> Tensor:
    """Return log of the mean of several distributions (.., V) in nats.

    Probabilities are averaged, not their logarithms: the models are equally likely. The result sums to one,
    and no model can veto a word that the others are sure of.
    """
    return functools.reduce(torch.logaddexp, log_probs) - math.log(len(log_probs))
