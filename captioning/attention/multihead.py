"""Multi-head attention (Vaswani et al. 2017): several alphas per step."""

from __future__ import annotations

from torch import Tensor, nn

from captioning.attention.base import AttentionOutput
from captioning.attention.memory import Memory, repeat_rows
from captioning.attention.scores import Score
from captioning.attention.soft import SoftAttention
from captioning.cells import GridSize
from captioning.errors import InputError, check_size, check_whole
from captioning.linear import Linear
from captioning.trace import State, map_fields


class MultiHeadAttention(SoftAttention):
    """z_t = W_o [z_t1; z_t2; ..]: the soft contexts of all heads, concatenated and projected (Vaswani et al. 2017).

    Each head attends with its own projections of size d / heads: a query, and keys and values, which are projections of
    the annotations, computed once per image. The score sees the heads as B * heads images, so that any score works. All
    heads share the score's parameters.

    Alphas are the mean over the heads; outside training, ``head_alphas`` has the alphas of each head. The doubly
    stochastic penalty therefore applies to the mean.

    Args:
        score: Gives each head's logits; with ``ScaledDotScore()`` this is the transformer's attention.
        heads: Number of heads.
        dim: Size d of all heads together, a multiple of ``heads``; None for the annotations' size D.
        dropout: Probability of dropping a weight of a head in training, as in ``SoftAttention``.
    """

    weighs_annotations = False

    def __init__(self, score: Score, *, heads: int = 4, dim: int | None = None, dropout: float = 0.0) -> None:
        super().__init__(score, dropout=dropout)
        check_whole(1, heads=heads)
        check_size(dim=dim)
        self.heads = heads
        self.dim = dim

    def build(self, annotation_dim: int, query_dim: int, grid_size: GridSize) -> None:
        dim = annotation_dim if self.dim is None else self.dim
        if dim % self.heads:
            raise InputError(f"MultiHeadAttention: {self.heads} heads cannot share dim {dim} evenly; choose a multiple")
        self.score.build(dim // self.heads, dim // self.heads, grid_size)
        self.query_projection = Linear(query_dim, dim)
        self.key_projection = nn.Linear(annotation_dim, dim)
        self.value_projection = nn.Linear(annotation_dim, dim)
        self.output = Linear(dim, annotation_dim)

    def _split(self, x: Tensor) -> Tensor:
        """Return x (B, .., d) as (B * heads, .., d / heads), the heads of an image adjacent."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2).flatten(0, 1)

    def prepare(self, annotations: Tensor, mask: Tensor | None = None) -> Memory:
        projected = self.score.project(self._split(self.key_projection(annotations)))  # (B * heads, ..)
        values = self._split(self.value_projection(annotations))  # (B * heads, L, d / heads)
        head_mask = None if mask is None else repeat_rows(mask, self.heads)
        return Memory(annotations, annotations, mask, inner=(Memory(values, projected, head_mask),))

    def init_state(self, memory: Memory) -> State:
        """Return the score's state for all heads: tensors (B, heads, ..)."""
        state = self.score.init_state(repeat_rows(memory.exists, self.heads))
        return tuple(tensor.unflatten(0, (-1, self.heads)) for tensor in state)

    def forward(self, query: Tensor, memory: Memory, state: State | None = None) -> tuple[AttentionOutput, State]:
        B = len(memory.annotations)
        heads = self.heads
        state = self._first_state(memory, len(query)) if state is None else state

        def to_heads(x: Tensor) -> Tensor:  # (N, heads, ..) -> (B * heads * R, ..)
            return x.unflatten(0, (B, -1)).transpose(1, 2).flatten(0, 2)

        def to_rows(x: Tensor) -> Tensor:  # (B * heads * R, ..) -> (N, heads, ..)
            return x.unflatten(0, (B, heads, -1)).transpose(1, 2).flatten(0, 1)

        queries = to_heads(self.query_projection(query).unflatten(-1, (heads, -1)))  # (B * heads * R, d / heads)
        attention_output, next_state = super().forward(queries, memory.inner[0], tuple(map(to_heads, state)))
        context, alphas, locations, *_ = map_fields(attention_output, to_rows)  # (N, heads, ..)
        assert locations is not None
        context = self.output(context.flatten(1))  # (N, D)
        head_alphas = None if self.training else alphas
        attention_output = AttentionOutput(context, alphas.mean(dim=1), locations[:, 0], head_alphas=head_alphas)
        return attention_output, tuple(map(to_rows, next_state))
