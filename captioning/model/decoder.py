"""What every decoder is to the rest: annotations become a memory, and steps over it become words."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from captioning.attention import AnnotationLayer, Attention, Memory
from captioning.component import Component
from captioning.errors import InputError, check_range
from captioning.kernels.compilation import Mode
from captioning.kernels.dropout import Dropout
from captioning.kernels.recurrence import to_autocast
from captioning.model.output import Drawn, Output
from captioning.trace import AttentionTrace

State = tuple[Tensor, ...]
"""What a decoder carries from step to step, (N, ..) each; always as many tensors."""


@dataclass(frozen=True)
class DecoderOutput:
    """Teacher forcing over N captions of T steps. M = sum of lengths, the steps that exist, caption by caption.

    Attributes:
        logits: (M, V), log-probabilities of the word at each existing step, unnormalised with the deep output.
        targets: (M,) int64, the words of the captions at those steps, <end> included.
        mask: (N, T) bool, True where a step exists; ``mask.nonzero()`` gives the rows of ``logits``.
        trace: of (N, T) steps; alphas, betas and heads are 0 at steps that do not exist. Outside training it has the
            posterior of the targets, where the output knows one.
        selection_log_probs: (N, T), log-probability in nats of the location that was drawn; 0 where the context is the
            expectation and at steps that do not exist. None for deterministic attention.
        drawn: (N, T) each, 0 at steps that do not exist, where the output drew locations in training.
    """

    logits: Tensor
    targets: Tensor
    mask: Tensor
    trace: AttentionTrace
    selection_log_probs: Tensor | None = None
    drawn: Drawn | None = None


def each(x: Tensor, rows: int) -> Tensor:
    """Return (N, ..) with every entry ``rows`` times, adjacent."""
    return x if rows == 1 else x.unsqueeze(1).expand(-1, rows, *x.shape[1:]).flatten(0, 1)


class ForcedSteps:
    """The steps of teacher forcing: which of them exist, what they are fed and what they are to say.

    Args:
        captions: (N, T+1) int64, ``<start> w_1 .. <end> <pad> ..``.
        lengths: (N,) int64, steps of each caption: its words and <end>.
        inputs: (N, T) int64, what is fed instead of the words before.
        rows: times that every caption is decoded, adjacent. All attributes but ``inputs`` are of N * rows rows.

    Attributes:
        inputs: (N, T).
        mask: (N, T) bool, True where a step exists.
        exists: (M,) int64, the positions of existing steps among all N * T.
        targets: (M,), their words.

    Raises:
        ValueError: one of another shape.
    """

    def __init__(self, captions: Tensor, lengths: Tensor, inputs: Tensor | None, rows: int = 1) -> None:
        if captions.dim() != 2 or lengths.shape != captions.shape[:1]:
            raise ValueError(f"captions must be (N, T+1), lengths (N,); got {captions.shape} and {lengths.shape}")
        T = captions.shape[1] - 1
        self.inputs = captions[:, :-1] if inputs is None else inputs
        if self.inputs.shape != (len(captions), T):
            raise ValueError(f"inputs must be ({len(captions)}, {T}), got {tuple(self.inputs.shape)}")
        self.mask = each(torch.arange(T, device=captions.device) < lengths.unsqueeze(1), rows)
        self.exists = self.mask.flatten().nonzero().squeeze(1)
        self.targets = each(captions[:, 1:], rows).flatten().index_select(0, self.exists)

    def of_existing(self, steps: Tensor) -> Tensor:
        """Return (M, ..) of (N, T, ..)."""
        return steps.flatten(0, 1).index_select(0, self.exists)

    def laid_out(self, flat: Tensor) -> Tensor:
        """Return (M, ..) as (N, T, ..), 0 at steps that do not exist."""
        empty = flat.new_zeros(self.mask.numel(), *flat.shape[1:])
        return empty.index_copy(0, self.exists, flat).unflatten(0, self.mask.shape)


class Decoder(Component):
    """Makes words of annotations. ``build`` must be called once before use; ``Captioner`` does.

    Args:
        attention: where to look.
        standardize_annotations, annotation_dropout, annotation_layer: what is done to the annotations first, in turn.

    Attributes:
        attention: the one that traces are of.
        words: how words follow from single locations; None where they follow from all that was looked at together.
        embedding: of the words that are fed.
    """

    attention: Attention
    words: Output | None
    embedding: nn.Embedding
    vocabulary_size: int
    annotation_dim: int

    def __init__(
        self,
        attention: Attention,
        *,
        standardize_annotations: bool = False,
        annotation_dropout: float = 0.0,
        annotation_layer: AnnotationLayer | None = None,
    ) -> None:
        super().__init__()
        check_range(0, 0.99, annotation_dropout=annotation_dropout)
        self.attention = attention
        self.standardize_annotations = standardize_annotations
        self.annotation_dropout = Dropout(annotation_dropout)
        self.annotation_layer = annotation_layer

    @property
    @abstractmethod
    def summary(self) -> str:
        """What it is, in a few words, such as "LSTM of 512"."""

    def attentions(self) -> Iterator[Attention]:
        """Yield everything that looks at annotations."""
        yield self.attention

    def compile_training(self, mode: Mode) -> None:
        """Run ``forward`` compiled while training; nothing else changes.

        Raises:
            InputError: there is nothing to compile.
        """
        raise InputError(f"compile: is for the steps of a recurrence, and {type(self).__name__} has none; leave it out")

    @abstractmethod
    def build(self, vocabulary_size: int, annotation_dim: int, grid_size: tuple[int, int] | None = None) -> None:
        """Create the parameters for V words and annotations of size D that lie on ``grid_size`` (rows, columns)."""

    def _build_for_annotations(
        self, vocabulary_size: int, annotation_dim: int, grid_size: tuple[int, int] | None
    ) -> int:
        """Create what stands before attention; returns the size of the annotations that it sees."""
        self.vocabulary_size = vocabulary_size
        self.annotation_dim = annotation_dim
        # affine=False: only the scale of the input changes, the layers behind it learn the rest.
        self.standardize = nn.BatchNorm1d(annotation_dim, affine=False) if self.standardize_annotations else None
        return (
            annotation_dim if self.annotation_layer is None else self.annotation_layer.build(annotation_dim, grid_size)
        )

    def encode(self, annotations: Tensor, mask: Tensor | None = None) -> Memory:
        """Return what the steps look at, computed once per image.

        Args:
            annotations: (B, L, D), any float type.
            mask: (B, L) bool, True where a location exists.
        """
        annotations = annotations.to(self.embedding.weight.dtype)
        if self.standardize is not None:
            annotations = self._standardized(annotations, mask)
        annotations = to_autocast(annotations)
        if self.training and self.annotation_dropout.p:
            channels = self.annotation_dropout(torch.ones_like(annotations[:, :1]))  # (B, 1, D)
            annotations = annotations * channels
        if self.annotation_layer is not None:
            annotations = to_autocast(self.annotation_layer(annotations, mask))  # norms give float32 on a GPU
        return self._prepare(annotations, mask)

    def _standardized(self, annotations: Tensor, mask: Tensor | None) -> Tensor:
        assert self.standardize is not None
        if mask is None:
            return self.standardize(annotations.flatten(0, 1)).view_as(annotations)
        standardized = torch.zeros_like(annotations)
        standardized[mask] = self.standardize(annotations[mask])  # absent locations must not enter the statistics
        return standardized

    @abstractmethod
    def _prepare(self, annotations: Tensor, mask: Tensor | None) -> Memory:
        """Return the memory of annotations as attention sees them, (B, L, D')."""

    def prepare_search(self, memory: Memory) -> Memory:
        """Return ``memory`` with all that ``step`` need not compute anew for every word."""
        return memory

    @abstractmethod
    def init_state(self, memory: Memory) -> State:
        """Return the state before the first step, (B, ..) each."""

    @abstractmethod
    def step(self, tokens: Tensor, state: State, memory: Memory) -> tuple[Tensor, State, AttentionTrace]:
        """Read the previous word and predict the next.

        Args:
            tokens: (N,) int64, y_{t-1}; N = B * R, the rows of an image adjacent.
            state: of the step before, or ``init_state``.
            memory: of B images.

        Returns:
            logits (N, V), the new state, and what was looked at.
        """

    @abstractmethod
    def forward(
        self, captions: Tensor, lengths: Tensor, memory: Memory, inputs: Tensor | None = None, rows: int = 1
    ) -> DecoderOutput:
        """Teacher forcing: predict every word from the true words before it.

        Args:
            captions: (N, T+1) int64, ``<start> w_1 .. <end> <pad> ..``; N = B * R, the captions of an image adjacent.
            lengths: (N,) int64, steps of each caption: its words and <end>.
            memory: of B images.
            inputs: (N, T) int64, words that are fed in the place of ``captions[:, :-1]``, <start> first.
            rows: times that every caption is decoded. The output is of N * rows rows, those of a caption adjacent, each
                with the dropout and the draws of its own.

        Raises:
            ValueError: captions, lengths or inputs of another shape.
        """
