"""Score functions f_att(a_i, h_{t-1}), Eq. 4."""

from __future__ import annotations

from torch import Tensor, nn

from captioning.attention.additive import additive_logits, plain_additive_logits
from captioning.attention.base import Score
from captioning.unroll import StepLinear


class AdditiveScore(Score):
    """e_ti = v^T tanh(W_a a_i + b + W_h h_{t-1}), Eq. 4 with the paper's one-hidden-layer perceptron.

    A constant added to all scores does not change the softmax, so the output layer has no bias.

    Args:
        attention_dim: A, the width of the hidden layer.
        fused: use a kernel where there is one; otherwise PyTorch's operations, one after the other.
    """

    def __init__(self, attention_dim: int = 512, *, fused: bool = True) -> None:
        super().__init__()
        self.attention_dim = attention_dim
        self._logits = additive_logits if fused else plain_additive_logits

    def build(self, annotation_dim: int, query_dim: int, grid_size: tuple[int, int] | None = None) -> None:
        self.annotation_projection = nn.Linear(annotation_dim, self.attention_dim)
        self.query_projection = StepLinear(query_dim, self.attention_dim, bias=False)
        self.output = nn.Linear(self.attention_dim, 1, bias=False)

    def project(self, annotations: Tensor) -> Tensor:
        return self.annotation_projection(annotations)

    def forward(self, query: Tensor, projected: Tensor) -> Tensor:
        return self._logits(projected, self.query_projection(query), self.output.weight[0])
