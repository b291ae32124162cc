"""Deterministic attention: the expectation over locations (Sec. 4.2), and a control with uniform alphas."""

from torch import Tensor, nn

from captioning.attention.base import Attention, AttentionOutput
from captioning.attention.memory import Memory, expected_context
from captioning.attention.normalizers import Normalizer
from captioning.attention.scores import LocationScore, Score
from captioning.cells import GridSize
from captioning.errors import check_range


class SoftAttention(Attention):
    """z_t = sum_i alpha_ti a_i, Eq. 13.

    Args:
        score: Gives the logits.
        normalizer: Turns the logits into alphas; None for ``Softmax()``.
        dropout: Probability of dropping a location's weight in training; the others are divided by 1 - dropout
            (Vaswani et al. 2017). Traces and penalties take the alphas before dropout.
    """

    def __init__(self, score: Score, *, normalizer: Normalizer | None = None, dropout: float = 0.0) -> None:
        super().__init__(score, normalizer=normalizer)
        check_range(0, 0.99, dropout=dropout)
        self.dropout = nn.Dropout(dropout)

    def select(self, alphas: Tensor, log_alphas: Tensor, memory: Memory) -> AttentionOutput:
        return AttentionOutput(expected_context(self.dropout(alphas), memory.annotations), alphas)


class UniformAttention(SoftAttention):
    """The control without attention: the context of every step is the mean annotation."""

    def __init__(self) -> None:
        super().__init__(_UniformScore())


class _UniformScore(LocationScore):
    """e_ti = 0."""

    def build(self, annotation_dim: int, query_dim: int, grid_size: GridSize) -> None:
        pass

    def forward(self, query: Tensor, projected: Tensor) -> Tensor:
        return query.new_zeros(*query.shape[:2], projected.shape[1])
