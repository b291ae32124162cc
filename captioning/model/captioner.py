"""Encoder and decoder together, nothing else."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from captioning.attention import Memory
from captioning.data.batch import CaptionBatch, pad_captions
from captioning.data.transforms import Preprocessing
from captioning.decoding import BeamOptions, Hypothesis, ImageStepFunction, State, Step, beam_search
from captioning.encoders import Encoder
from captioning.model.decoder import Decoder, DecoderOutput


class _Stepper:
    """One decoder step over the images of a memory."""

    def __init__(self, decoder: Decoder, memory: Memory) -> None:
        self.decoder, self.memory = decoder, memory
        self.images = memory.annotations.shape[0]

    def __call__(self, tokens: Tensor, state: State) -> Step:
        logits, state, trace = self.decoder.step(tokens, state, self.memory)
        return Step(torch.log_softmax(logits.float(), dim=-1), state, trace)

    def select(self, images: Tensor) -> _Stepper:
        return _Stepper(self.decoder, self.memory.select(images))


class CaptionModel(nn.Module):
    """What captions images: a ``Captioner``, or several of them (``captioning.model.ensemble``).

    A memory is what the model keeps of a batch of images while it searches for their captions.

    Attributes:
        encoder: says where the locations of a trace lie, on which view of the image.
    """

    encoder: Encoder

    @property
    @abstractmethod
    def preprocessings(self) -> list[Preprocessing]:
        """The views of an image that ``encode_views`` takes."""

    @abstractmethod
    def encode_views(self, views: Sequence[Tensor]) -> Any:
        """Return the memory of images, (B, 3, height, width) for each of ``preprocessings``."""

    @abstractmethod
    def encode_batch(self, batch: CaptionBatch) -> Any:
        """Return the memory of a batch's images."""

    @abstractmethod
    def teacher_force(self, batch: CaptionBatch, memory: Any) -> DecoderOutput:
        """Return the words and traces of every caption in the batch, over the memory of its images."""

    @abstractmethod
    def stepper(self, memory: Any) -> ImageStepFunction:
        """Return the step function over ``memory`` that ``decoding`` searches with."""

    @abstractmethod
    def init_state(self, memory: Any) -> State:
        """Return the state before the first step, (B, ..) each."""

    @abstractmethod
    def inferring(self, mode: str | None) -> AbstractContextManager[None]:
        """Form contexts by an inference mode of attention for a while; None by the one that is set.

        Raises:
            InputError: the attention does not know the mode.
        """

    @abstractmethod
    def with_posterior(self, memory: Any, found: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
        """Return hypotheses of every image with the posterior in their traces, as they are if the output has none."""

    @torch.inference_mode()
    def search(self, memory: Any, options: BeamOptions) -> list[list[Hypothesis]]:
        """Return the beam-search hypotheses of every image in ``memory``, best first."""
        return beam_search(
            self.stepper(memory),
            self.init_state(memory),
            beam_size=options.beam_size,
            length_normalization=options.length_normalization,
            max_length=options.max_length,
            min_length=options.min_length,
        )

    @torch.inference_mode()
    def force_decode(self, memory: Any, captions: list[list[int]]) -> list[Hypothesis]:
        """Return given captions, word ids, one per image of ``memory``, as a search would have found them.

        Their log-probabilities and traces, with the posterior if the output has one, come from teacher forcing.
        """
        ids, lengths = pad_captions(captions)
        each = torch.arange(len(captions))
        batch = CaptionBatch(ids, lengths, each, each, each).to(next(self.parameters()).device)
        output = self.teacher_force(batch, memory)
        log_probs = torch.log_softmax(output.logits.float(), dim=-1).gather(1, output.targets.unsqueeze(1)).squeeze(1)
        trace = output.trace.map(Tensor.cpu)
        return [
            Hypothesis(
                known,
                each.tolist(),
                float(each.sum()),
                finished=True,
                trace=trace.map(itemgetter((row, slice(len(known))))),
            )
            for row, (known, each) in enumerate(zip(captions, log_probs.cpu().split(lengths.tolist()), strict=True))
        ]


class Captioner(CaptionModel):
    """An image captioner, assembled: the decoder is built for the encoder's annotations and the vocabulary.

    Args:
        encoder: images -> annotations (B, L, D).
        decoder: annotations -> words.
        vocabulary_size: V, special tokens included.
    """

    def __init__(self, encoder: Encoder, decoder: Decoder, *, vocabulary_size: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        decoder.build(vocabulary_size, encoder.annotation_dim, encoder.grid_size)

    def encode(
        self, images: Tensor | None = None, annotations: Tensor | None = None, mask: Tensor | None = None
    ) -> Memory:
        """Return the decoder's memory of images (B, 3, height, width) or of their annotations (B, L, D).

        Raises:
            ValueError: neither is given, or annotations of another size than the encoder makes.
        """
        if annotations is None:
            if images is None:
                raise ValueError("a batch needs images or annotations, it has neither")
            annotations = self.encoder(images)
        if annotations.shape[-1] != self.encoder.annotation_dim:
            raise ValueError(f"annotations must have size {self.encoder.annotation_dim}, got {annotations.shape[-1]}")
        return self.decoder.encode(annotations, mask)

    def encode_batch(self, batch: CaptionBatch) -> Memory:
        return self.encode(batch.images, batch.annotations, batch.annotation_mask)

    @property
    def preprocessings(self) -> list[Preprocessing]:
        return [self.encoder.preprocessing]

    def encode_views(self, views: Sequence[Tensor]) -> Memory:
        return self.encode(views[0])

    def forward(self, batch: CaptionBatch, samples: int = 1) -> DecoderOutput:
        """Teacher-forced logits and alphas of every caption in the batch.

        Args:
            samples: rows per caption, adjacent, which differ in what a stochastic attention draws for them.
        """
        return self.teacher_force(batch, self.encode_batch(batch), samples)

    def teacher_force(self, batch: CaptionBatch, memory: Memory, samples: int = 1) -> DecoderOutput:
        """``forward`` over the memory of the batch's images."""
        memory = self.memory_of_captions(batch, memory)
        return self.decoder(batch.captions, batch.lengths, memory, batch.inputs, samples)

    def memory_of_captions(self, batch: CaptionBatch, memory: Memory) -> Memory:
        """Return the memory of the batch's images so that all have as many of its captions, adjacent ones."""
        images, rows = batch.image_ids.shape[0], batch.captions.shape[0]
        each = torch.arange(images, device=batch.image_index.device).repeat_interleave(max(1, rows // images))
        # Images with different numbers of captions need a row for each.
        return memory if torch.equal(batch.image_index, each) else memory.select(batch.image_index)

    def stepper(self, memory: Memory) -> ImageStepFunction:
        return _Stepper(self.decoder, self.decoder.prepare_search(memory))

    def init_state(self, memory: Memory) -> State:
        return self.decoder.init_state(memory)

    def inferring(self, mode: str | None) -> AbstractContextManager[None]:
        return nullcontext() if mode is None else self.decoder.attention.inferring(mode)

    @torch.inference_mode()
    def with_posterior(self, memory: Memory, found: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
        """``CaptionModel.with_posterior``. Costs one pass of teacher forcing over them."""
        words = self.decoder.words
        if words is None or not words.has_posterior:
            return found
        captions, lengths = pad_captions([hypothesis.ids for hypotheses in found for hypothesis in hypotheses])
        counts = torch.tensor([len(hypotheses) for hypotheses in found])
        device = memory.annotations.device
        each = torch.arange(len(found)).repeat_interleave(counts).to(device)
        trace = self.decoder(captions.to(device), lengths.to(device), memory.select(each)).trace
        posteriors = iter(trace.posterior.float().cpu())
        return [
            [
                replace(known, trace=known.trace._replace(posterior=next(posteriors)[: len(known.ids)]))
                for known in hypotheses
            ]
            for hypotheses in found
        ]
