"""The two halves of attention: a score gives logits over locations, a selection turns them into a context."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from captioning.component import Component
from captioning.errors import InputError
from captioning.kernels.marginal import Located
from captioning.kernels.unroll import matmul, share
from captioning.trace import EXPECTATION

State = tuple[Tensor, ...]
"""What attention carries from one step to the next. The first axis of every tensor is that of the rows, N."""


def for_rows(state: State, rows: int) -> State:
    """Return a state of B images, (B, ..) each, for ``rows`` rows of every image, adjacent."""
    return tuple(part.repeat_interleave(rows, 0) for part in state) if rows > 1 else state


class AttentionOutput(NamedTuple):
    """One step of attention for N rows.

    Attributes:
        context: (N, D), the paper's z-hat before the gate.
        alphas: (N, L), softmax of the scores: probabilities, exactly 0 at masked locations.
        locations: (N,) int64, the location that the context was taken from; ``trace.EXPECTATION`` where it is the
            expectation.
        log_prob: (N,), log-probability in nats of the location that was drawn, 0 where the context is the expectation;
            None for deterministic attention.
        state: for the next step.
        heads: (N, h, L), the alphas of each of h heads, whose mean ``alphas`` are; None where there are none.
    """

    context: Tensor
    alphas: Tensor
    locations: Tensor
    log_prob: Tensor | None = None
    state: State = ()
    heads: Tensor | None = None


class Selected(NamedTuple):
    """What a selection makes of the alphas of B images with R rows each.

    Attributes:
        context: (B, R, D).
        locations: (B, R) int64, as in ``AttentionOutput``; None where all contexts are expectations.
        log_prob: (B, R), as in ``AttentionOutput``.
    """

    context: Tensor
    locations: Tensor | None = None
    log_prob: Tensor | None = None


@dataclass(frozen=True)
class Memory:
    """What attention looks at, prepared once per image. N = B * R rows look at B images, an image's rows adjacent.

    Attributes:
        annotations: (B, L, D).
        projected: the score's projection of the annotations, usually (B, L, A) or (B, A, L). May have several rows for
            an image, adjacent.
        mask: (B, L) bool, True where a location exists; None when all do.
        expected: (B,) bool, True for images whose context is the expectation although attention is stochastic
            (semi-sampling); None where that is not decided image by image.
        located: what the decoder's output computed of the images for a search.
        kept_units: (N, H) factors of h in the recurrence, the same at all steps of a row: the decoder's recurrent
            dropout. None outside training.
        rows_differ: whether rows that read the same words may look at different places in training. Where attention
            draws and drops nothing, one row's recurrence is that of all rows of a caption.
    """

    annotations: Tensor
    projected: Tensor
    mask: Tensor | None = None
    expected: Tensor | None = None
    located: Located | None = None
    kept_units: Tensor | None = None
    rows_differ: bool = True

    @property
    def exists(self) -> Tensor:
        """(B, L) bool, True where a location exists."""
        if self.mask is not None:
            return self.mask
        return torch.ones(self.annotations.shape[:2], dtype=torch.bool, device=self.annotations.device)

    def shared(self) -> Memory:
        """Return this memory for many steps whose gradients are collected, see ``captioning.kernels.unroll``."""
        return replace(self, annotations=share(self.annotations), projected=share(self.projected))

    def select(self, images: Tensor) -> Memory:
        """Return the memory of the given images, (B',) indices."""
        parts = (len(self.annotations), -1)
        chosen: dict[str, Any] = {
            name: part.unflatten(0, parts).index_select(0, images).flatten(0, 1) if isinstance(part, Tensor) else part
            for name, part in vars(self).items()
        }
        if self.located is not None:
            chosen["located"] = self.located.select(images)
        return type(self)(**chosen)


def masked_log_softmax(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return log-softmax over the last axis where ``mask`` is True, -inf elsewhere; at least in float32.

    Args:
        logits: (..., L).
        mask: bool, broadcastable to ``logits``; every row must have one True.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    return torch.log_softmax(logits, dim=-1)


class Score(Component):
    """e_ti = f_att(a_i, h_{t-1}), Eq. 4.

    A score may carry something from step to step, such as the alphas before: ``init_state`` makes it, ``forward`` takes
    it as further arguments, ``update`` says how it goes on. Most scores carry nothing.

    Attributes:
        deterministic: the same queries get the same logits, also in training. A subclass of a score that says so, but
            drops units or draws, must say False.
    """

    deterministic = False

    @abstractmethod
    def build(self, annotation_dim: int, query_dim: int, grid_size: tuple[int, int] | None = None) -> None:
        """Create the parameters for annotations of size D and queries of size H.

        Args:
            grid_size: as ``Attention.build`` has it.
        """

    @abstractmethod
    def project(self, annotations: Tensor) -> Tensor:
        """Return (B, L, A): all that does not depend on the query, computed once per image."""

    @abstractmethod
    def forward(self, query: Tensor, projected: Tensor) -> Tensor:
        """Return logits (B, R, L) of queries (B, R, H) over projected annotations (B, L, A).

        A score with a state gets its tensors, (B, R, ..) each, as further arguments.
        """

    def init_state(self, exists: Tensor) -> State:
        """Return what the first step starts with, (B, ..) each, for locations that exist (B, L) bool."""
        return ()

    def update(self, alphas: Tensor, *state: Tensor) -> State:
        """Return the state of the next step after alphas (B, R, L)."""
        return state


class Attention(Component):
    """A score and a selection. Subclasses say in ``select`` how alphas become a context.

    Attributes:
        inference: what the context is formed with in eval mode: "expected", the expectation over locations; "argmax",
            the most probable location; "sample", a location drawn. May be set at any time; deterministic attention
            knows the expectation alone.
        needs_estimator: its draws pass no gradient on, so that training needs an estimator of it.
    """

    score: Score
    inference_modes: tuple[str, ...] = ("expected",)
    needs_estimator = False
    _inference = "expected"

    @property
    def inference(self) -> str:
        return self._inference

    @inference.setter
    def inference(self, mode: str) -> None:
        if mode not in self.inference_modes:
            known = ", ".join(self.inference_modes)
            raise InputError(f"inference: {type(self).__name__} knows {known}, got {mode!r}")
        self._inference = mode

    @property
    def draws(self) -> bool:
        """Whether the next training batch may have locations drawn for it; the same on every process."""
        return False

    @property
    def deterministic(self) -> bool:
        """Whether rows that read the same words see the same in the next training batch: nothing is drawn or dropped.

        A subclass of an attention that is, but draws or drops something, must say False.
        """
        return False

    def schedule(self) -> dict[str, float]:
        """Return what changes by a schedule in training, by name."""
        return {}

    @contextmanager
    def inferring(self, mode: str) -> Iterator[None]:
        """Form contexts by the inference mode ``mode`` for a while, whether the model is being trained or not."""
        before = self.inference, self.training
        self.inference = mode
        self.train(False)
        try:
            yield
        finally:
            self.inference = before[0]
            self.train(before[1])

    def build(self, annotation_dim: int, query_dim: int, grid_size: tuple[int, int] | None = None) -> None:
        """Create the parameters for annotations of size D and queries of size H.

        Args:
            grid_size: (rows, columns) of the locations, for attention that knows where they lie; None where they form
                no grid.
        """
        self.score.build(annotation_dim, query_dim, grid_size)

    def prepare(self, annotations: Tensor, mask: Tensor | None = None) -> Memory:
        """Return the memory of annotations (B, L, D) with an optional bool mask (B, L).

        Raises:
            ValueError: a mask of another shape, or an image without a single location.
        """
        check_mask(annotations, mask)
        return Memory(annotations, self.score.project(annotations), mask, rows_differ=not self.deterministic)

    def groups(self, memory: Memory) -> list[tuple[Tensor, Memory]]:
        """Return the images of a training batch by whether their rows differ, (B',) indices and their memory each.

        Empty where attention knows no more of them than ``memory.rows_differ``.
        """
        return []

    def init_state(self, memory: Memory) -> State:
        """Return what the first step starts with, (B, ..) each."""
        return self.score.init_state(memory.exists)

    def forward(self, query: Tensor, memory: Memory, state: State | None = None) -> AttentionOutput:
        """Attend with queries (N, H), N = B * R, and the state of the step before; None at the first step."""
        images = memory.annotations.shape[0]
        if state is None:
            state = for_rows(self.init_state(memory), len(query) // images)
        queries, *carried = (x.unflatten(0, (images, -1)) for x in (query, *state))  # (B, R, ..)
        logits = self.score(queries, memory.projected, *carried)  # (B, R, L), Eq. 4
        log_alphas = masked_log_softmax(logits, None if memory.mask is None else memory.mask.unsqueeze(1))  # Eq. 5
        alphas = log_alphas.exp()
        context, locations, log_prob = self.select(alphas, log_alphas, memory)  # Eq. 6
        after = self.score.update(alphas, *carried)
        if locations is None:
            locations = torch.full(alphas.shape[:2], EXPECTATION, device=alphas.device)
        return AttentionOutput(
            context=context.flatten(0, 1),
            alphas=alphas.flatten(0, 1),
            locations=locations.flatten(),
            log_prob=None if log_prob is None else log_prob.flatten(),
            state=tuple(part.flatten(0, 1) for part in after),
        )

    @abstractmethod
    def select(self, alphas: Tensor, log_alphas: Tensor, memory: Memory) -> Selected:
        """Form the contexts of alphas (B, R, L); at masked locations they are 0 and their logarithms -inf."""


def check_grid(score: Score, grid_size: tuple[int, int] | None, instead: str = "another score") -> tuple[int, int]:
    """Return the grid, for a score that knows where locations lie.

    Args:
        instead: what to use where there is none.

    Raises:
        InputError: the locations form no grid.
    """
    if grid_size is None:
        raise InputError(
            f"{type(score).__name__} needs locations on a grid, and the encoder's grid_size is None; use {instead}"
        )
    return grid_size


def check_locations(annotations: Tensor, grid_size: tuple[int, int]) -> None:
    """Refuse annotations (B, L, D) of another number of locations than the grid has.

    Raises:
        ValueError: there are more or fewer.
    """
    rows, columns = grid_size
    if annotations.shape[1] != rows * columns:
        raise ValueError(f"a grid of {rows} x {columns} has {rows * columns} locations, got {annotations.shape[1]}")


def check_mask(annotations: Tensor, mask: Tensor | None) -> None:
    """Refuse a mask that does not fit annotations (B, L, D).

    Raises:
        ValueError: a mask of another shape, or an image without a single location.
    """
    if mask is not None:
        if mask.shape != annotations.shape[:2]:
            raise ValueError(f"annotation mask must be {tuple(annotations.shape[:2])}, got {tuple(mask.shape)}")
        if not mask.any(dim=1).all():
            raise ValueError("every image needs at least one location that is not masked")


def expected_context(weights: Tensor, annotations: Tensor) -> Tensor:
    """Return sum_i w_i a_i for weights (B, R, L) and annotations (B, L, D) as (B, R, D)."""
    return matmul(weights.to(annotations.dtype), annotations)
