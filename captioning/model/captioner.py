"""Encoder and decoder together, and the searches that every captioning model has."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from captioning.attention import Memory
from captioning.attention.memory import repeat_rows
from captioning.component import Component, check_shape
from captioning.data.batch import CaptionBatch, pad_captions
from captioning.data.transforms import Preprocessing
from captioning.decoding import BeamOptions, DecodingOptions, Hypothesis, Step, StepFunction, decode
from captioning.encoders import Encoder
from captioning.errors import InputError
from captioning.model.decoder import Decoder, DecoderOutput
from captioning.trace import State, map_fields
from captioning.vocabulary import Vocabulary


class _DecoderStepFunction:
    """The decoder's step function over the images of a memory, as ``decoding`` takes it."""

    def __init__(self, decoder: Decoder, memory: Memory) -> None:
        self.decoder, self.memory = decoder, memory
        self.image_count = memory.annotations.shape[0]

    def __call__(self, tokens: Tensor, state: State) -> Step:
        logits, state, trace = self.decoder.step(tokens, state, self.memory)
        return Step(torch.log_softmax(logits.float(), dim=-1), state, trace)

    def select_images(self, images: Tensor) -> _DecoderStepFunction:
        return _DecoderStepFunction(self.decoder, self.memory.select_images(images))


class CaptionModel(nn.Module, metaclass=ABCMeta):
    """A model that captions images: a ``Captioner``, or an ``Ensemble`` of several.

    A memory holds a batch of encoded images.

    Attributes:
        encoder: The encoder; its cells are the locations of a trace.
    """

    encoder: Encoder

    @property
    @abstractmethod
    def preprocessings(self) -> list[Preprocessing]:
        """The preprocessing of each view of an image that ``encode_views`` takes."""

    @abstractmethod
    def encode_views(self, views: Sequence[Tensor]) -> Any:
        """Return the memory of images, given one view (B, 3, height, width) for each of ``preprocessings``."""

    @abstractmethod
    def encode_batch(self, batch: CaptionBatch) -> Any:
        """Return the memory of a batch's images."""

    @abstractmethod
    def teacher_force(self, batch: CaptionBatch, memory: Any) -> DecoderOutput:
        """Return the decoder's output for every caption of the batch, whose images are in ``memory``."""

    @abstractmethod
    def step_function(self, memory: Any) -> StepFunction:
        """Return the step function over ``memory`` that ``decoding`` searches with."""

    @abstractmethod
    def init_state(self, memory: Any) -> State:
        """Return the state before the first step: tensors (B, ..)."""

    @abstractmethod
    def in_context_mode(self, mode: str | None) -> AbstractContextManager[None]:
        """Use a context mode of attention within a ``with`` block; None keeps the model's own.

        Raises InputError if the attention does not know the mode.
        """

    def evidence(self, batch: CaptionBatch, memory: Any) -> Tensor | None:
        """Return ``Decoder.evidence`` of the batch's captions, whose images are in ``memory``."""
        return None

    @torch.inference_mode()
    def with_evidence(self, memory: Any, hypotheses: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
        """Return the hypotheses of every image, with evidence in their traces if the model has it."""
        evidence = self.evidence(self._make_batch([[h.ids for h in image] for image in hypotheses]), memory)
        if evidence is None:
            return hypotheses
        rows = iter(evidence.float().cpu())  # (T, L) each
        return [
            [replace(h, trace=h.trace._replace(evidence=next(rows)[: len(h.ids)])) for h in image]
            for image in hypotheses
        ]

    def _make_batch(self, captions: list[list[list[int]]]) -> CaptionBatch:
        """Return the captions of every image, lists of word ids, as a batch without images."""
        ids, lengths = pad_captions([caption for image in captions for caption in image])
        images = torch.arange(len(captions))
        image_index = torch.tensor([index for index, image in enumerate(captions) for _ in image])
        return CaptionBatch(ids, lengths, image_index, images, images).to(next(self.parameters()).device)

    @contextmanager
    def with_context_and_seed(self, options: DecodingOptions) -> Iterator[None]:
        """Use the context mode and the seed of the options within a ``with`` block, where they are not None."""
        device = next(self.parameters()).device
        with torch.random.fork_rng([device] if device.type == "cuda" else [], options.seed is not None):
            if options.seed is not None:
                torch.manual_seed(options.seed)
            with self.in_context_mode(options.context_mode):
                yield

    @torch.inference_mode()
    def search(self, memory: Any, options: BeamOptions, vocabulary: Vocabulary | None = None) -> list[list[Hypothesis]]:
        """Return the captions of every image in ``memory``, in the order of ``decoding.decode``."""
        if not isinstance(options, DecodingOptions):
            options = DecodingOptions(**vars(options))
        with self.with_context_and_seed(options):
            return decode(self.step_function(memory), self.init_state(memory), options, vocabulary)

    @torch.inference_mode()
    def teacher_force_captions(self, memory: Any, captions: list[list[int]]) -> list[Hypothesis]:
        """Return the captions, lists of word ids, one per image of ``memory``, as hypotheses.

        Teacher forcing gives their log-probabilities and traces, with evidence if the model has it.
        """
        batch = self._make_batch([[ids] for ids in captions])
        output = self.teacher_force(batch, memory)
        log_probs = torch.log_softmax(output.logits.float(), dim=-1).gather(1, output.targets.unsqueeze(1)).squeeze(1)
        trace = map_fields(output.trace._replace(evidence=self.evidence(batch, memory)), Tensor.cpu)
        traces = [map_fields(trace, itemgetter((row, slice(len(ids))))) for row, ids in enumerate(captions)]
        fields = zip(captions, log_probs.cpu().split(batch.lengths.tolist()), traces, strict=True)
        return [Hypothesis(ids, log_p.tolist(), float(log_p.sum()), True, trace) for ids, log_p, trace in fields]


class Captioner(CaptionModel):
    """Encoder and decoder; the decoder is built for the encoder's annotations and the vocabulary.

    Args:
        encoder: Turns images into annotations (B, L, D).
        decoder: Turns annotations into words. Raises InputError if a component of it belongs to another captioner.
        vocabulary_size: V, special tokens included.

    Attributes:
        freeze_statistics: Whether training keeps the statistics of ``Decoder.feature_norm``. It is set when training
            starts from another model's weights, because twenty photos are too few to estimate them.
    """

    def __init__(self, encoder: Encoder, decoder: Decoder, *, vocabulary_size: int) -> None:
        super().__init__()
        components = [module for module in decoder.modules() if isinstance(module, Component)]
        if built := next((component for component in components if component.is_built), None):
            raise InputError(f"{type(built).__name__}: is another captioner's; make one for each captioner")
        self.encoder = encoder
        self.decoder = decoder
        self.freeze_statistics = False
        decoder.build(vocabulary_size, encoder.annotation_dim, encoder.grid_size)
        for component in components:
            component.is_built = True

    def train(self, mode: bool = True) -> Captioner:
        """Set the mode; ``freeze_statistics`` has an effect only while the encoder is frozen."""
        super().train(mode)
        if self.freeze_statistics and self.encoder.frozen and self.decoder.feature_norm is not None:
            self.decoder.feature_norm.eval()
        return self

    def encode(
        self, images: Tensor | None = None, annotations: Tensor | None = None, mask: Tensor | None = None
    ) -> Memory:
        """Return the decoder's memory of images (B, 3, height, width) or of their annotations (B, L, D).

        Raises InputError if annotations have another size than the encoder's.
        """
        annotations = self.encoder(images) if annotations is None else annotations  # (B, L, D)
        D = self.encoder.annotation_dim
        check_shape(self.encoder, "annotations (B, L, D)", annotations, *annotations.shape[:2], D)
        return self.decoder.encode(annotations, mask)

    def encode_batch(self, batch: CaptionBatch) -> Memory:
        return self.encode(batch.images, batch.annotations, batch.annotation_mask)

    @property
    def preprocessings(self) -> list[Preprocessing]:
        return [self.encoder.preprocessing]

    def encode_views(self, views: Sequence[Tensor]) -> Memory:
        return self.encode(views[0])

    def forward(self, batch: CaptionBatch) -> DecoderOutput:
        return self.teacher_force(batch, self.encode_batch(batch))

    def teacher_force(self, batch: CaptionBatch, memory: Memory, samples: int = 1) -> DecoderOutput:
        """Teacher-force each caption ``samples`` times, with new draws and dropout; its samples are adjacent."""
        return self.decoder(batch.captions, batch.lengths, memory_of_captions(batch, memory), samples)

    def evidence(self, batch: CaptionBatch, memory: Memory) -> Tensor | None:
        return self.decoder.evidence(batch.captions, batch.lengths, memory_of_captions(batch, memory))

    def step_function(self, memory: Memory) -> StepFunction:
        return _DecoderStepFunction(self.decoder, self.decoder.to_search_memory(memory))

    def init_state(self, memory: Memory) -> State:
        return self.decoder.init_state(memory)

    def in_context_mode(self, mode: str | None) -> AbstractContextManager[None]:
        return nullcontext() if mode is None else self.decoder.attention.in_context_mode(mode)


def memory_of_captions(batch: CaptionBatch, memory: Memory) -> Memory:
    """Return ``memory`` if every image has R adjacent captions, else a memory with one image per caption."""
    B, N = batch.image_ids.shape[0], batch.captions.shape[0]
    image_index = repeat_rows(torch.arange(B, device=batch.image_index.device), max(1, N // B))
    return memory if torch.equal(batch.image_index, image_index) else memory.select_images(batch.image_index)
