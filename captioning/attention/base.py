"""Attention: a score gives logits (Eq. 4), a normalizer alphas (Eq. 5), and a selection the context (Eq. 6)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from captioning.attention.memory import Memory, repeat_rows
from captioning.attention.normalizers import Normalizer, Softmax
from captioning.attention.scores import Score
from captioning.cells import GridSize
from captioning.component import Component, check_shape
from captioning.errors import InputError, check_choice
from captioning.trace import NO_LOCATION, AttentionTrace, State, map_fields


class AttentionOutput(NamedTuple):
    """What attention returns for N rows, (N, ..). ``select`` returns the same record for R rows per image, (B, R, ..).

    Attributes:
        context: (.., D), the paper's z-hat.
        alphas: (.., L), the normalized logits, at least float32: probabilities, exactly 0 at masked locations.
        locations: (..) int64, the location whose annotation is the context; ``trace.NO_LOCATION`` where the context is
            an expectation. A selection that only takes expectations may leave it None.
        location_log_prob: (..), log-probability in nats of ``locations``, 0 where the context is an expectation; None
            for attention that never draws.
        head_alphas: (.., heads, L), each head's alphas, with the mean ``alphas``; None in training and without heads.
    """

    context: Tensor
    alphas: Tensor
    locations: Tensor | None = None
    location_log_prob: Tensor | None = None
    head_alphas: Tensor | None = None

    def trace(self) -> AttentionTrace:
        """Return the attention trace, without betas."""
        return AttentionTrace(self.alphas, None, self.locations, head_alphas=self.head_alphas)


class Attention(Component):
    """A score, a normalizer and a selection. Subclasses implement ``select``, which turns alphas into a context.

    Args:
        score: Gives the logits.
        normalizer: Turns logits into alphas; None for ``Softmax()``.

    Attributes:
        context_mode: How eval mode forms the context: "expected", the expectation over locations; "argmax" or "sample",
            the annotation of the most probable or of a drawn location. It may be set at any time. Attention that never
            draws has only "expected".
        weighs_annotations: Whether the context is a weighted sum of the annotations themselves.
        needs_estimator: Whether draws block the gradient to the alphas, so that training needs an estimator.
        needs_progress: Whether a quantity changes over training, so that ``progress`` must be set.
        progress: The fraction of training, 0 to 1, that is done. The trainer sets it before each batch; a loop of your
            own must do the same.
    """

    context_modes: tuple[str, ...] = ("expected",)
    weighs_annotations = True
    needs_estimator = False
    needs_progress = False
    progress: float | None = None
    _context_mode = "expected"

    def __init__(self, score: Score, *, normalizer: Normalizer | None = None) -> None:
        super().__init__()
        self.score = score
        self.normalizer = Softmax() if normalizer is None else normalizer

    @property
    def context_mode(self) -> str:
        return self._context_mode

    @context_mode.setter
    def context_mode(self, mode: str) -> None:
        check_choice(self.context_modes, **{f"{type(self).__name__}.context_mode": mode})
        self._context_mode = mode

    @property
    def can_draw(self) -> bool:
        """Whether locations can be drawn, in training or in evaluation."""
        return "sample" in self.context_modes

    @property
    def may_draw(self) -> bool:
        """Whether locations may be drawn in this training batch; the same on every process."""
        return False

    @property
    def samples_share_contexts(self) -> bool:
        """Whether all samples of a caption get equal contexts in this training batch: nothing is drawn or dropped.

        Override it in a class whose random numbers come neither from draws of locations nor from ``nn.Dropout``.
        """
        has_dropout = any(isinstance(module, nn.Dropout) and module.p for module in self.modules())
        return self.training and not (self.may_draw or has_dropout)

    def logged_values(self) -> dict[str, float]:
        """Return current values for the logs, by name."""
        return {}

    @contextmanager
    def in_context_mode(self, mode: str) -> Iterator[None]:
        """Use the context mode ``mode`` within this ``with`` block, also during training."""
        mode_before, training_before = self.context_mode, self.training
        self.context_mode = mode
        self.train(False)
        try:
            yield
        finally:
            self.context_mode = mode_before
            self.train(training_before)

    def build(self, annotation_dim: int, query_dim: int, grid_size: GridSize) -> None:
        """Create the parameters for annotations of size D, on a grid (height, width), and queries of size H."""
        if self.score.needs_softmax and not isinstance(self.normalizer, Softmax):
            raise InputError(
                f"normalizer: {type(self.score).__name__} gives logarithms of weights, which only a softmax turns back "
                f"into weights; leave out {type(self.normalizer).__name__}, or use another score"
            )
        self.score.build(annotation_dim, query_dim, grid_size)

    def prepare(self, annotations: Tensor, mask: Tensor | None = None) -> Memory:
        """Return the memory of annotations (B, L, D); a mask (B, L) bool is True where a location exists."""
        return Memory(annotations, self.score.project(annotations), mask)

    def init_state(self, memory: Memory) -> State:
        """Return the state before the first step: tensors (B, ..)."""
        return self.score.init_state(memory.exists)

    def _first_state(self, memory: Memory, N: int) -> State:
        """Return ``init_state`` for N rows: tensors (N, ..)."""
        return tuple(repeat_rows(tensor, N // len(memory.annotations)) for tensor in self.init_state(memory))

    def forward(self, query: Tensor, memory: Memory, state: State | None = None) -> tuple[AttentionOutput, State]:
        """Attend with queries (N, H), N = B * R; return the output and the next state. The first ``state`` is None."""
        B, L, D = memory.annotations.shape
        state = self._first_state(memory, len(query)) if state is None else state
        queries, *score_state = (x.unflatten(0, (B, -1)) for x in (query, *state))  # (B, R, ..)
        logits = self.score(queries, memory.projected, *score_state)  # (B, R, L), Eq. 4
        check_shape(self.score, "logits (B, R, L)", logits, B, queries.shape[1], L)
        mask = None if memory.mask is None else memory.mask.unsqueeze(1)
        alphas, log_alphas = self.normalizer(logits, mask)  # (B, R, L), Eq. 5
        attention_output = self.select(alphas, log_alphas, memory)  # context (B, R, D), Eq. 6
        check_shape(self, "the context (B, R, D)", attention_output.context, *alphas.shape[:2], D)
        check_shape(self, "alphas (B, R, L)", attention_output.alphas, *alphas.shape)
        if attention_output.locations is None:
            no_location = torch.full(alphas.shape[:2], NO_LOCATION, device=alphas.device)
            attention_output = attention_output._replace(locations=no_location)
        next_state = self.score.update(alphas, *score_state)
        attention_output = map_fields(attention_output, lambda field: field.flatten(0, 1))  # (N, ..)
        return attention_output, tuple(tensor.flatten(0, 1) for tensor in next_state)

    @abstractmethod
    def select(self, alphas: Tensor, log_alphas: Tensor, memory: Memory) -> AttentionOutput:
        """Return the contexts. Outside the support and where masked, alphas (B, R, L) are 0, log_alphas -inf."""
