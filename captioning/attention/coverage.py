"""Coverage: a score that depends on where the caption has looked so far."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from captioning.attention.scores import AdditiveScore
from captioning.trace import State


class CoverageScore(AdditiveScore):
    """e_ti = v^T tanh(W_a a_i + b + W_h h_{t-1} + w_c c_ti) with c_ti = sum_{t' < t} alpha_t'i.

    See et al. 2017, Eq. 11 (the linguistic coverage of Tu et al. 2016, with the additive score). The sum of alphas
    differs between the captions of an image, so the hidden layer is computed for every caption and location.

    Args:
        attention_dim: Width A of the hidden layer.
    """

    def __init__(self, attention_dim: int = 512) -> None:
        super().__init__(attention_dim)

    def build(self, annotation_dim: int, query_dim: int, grid_size: tuple[int, int] | None = None) -> None:
        super().build(annotation_dim, query_dim, grid_size)
        self.coverage_weight = nn.Parameter(torch.zeros(self.attention_dim))  # starts as the additive score

    def init_state(self, exists: Tensor) -> State:
        return (torch.zeros_like(exists, dtype=torch.float32),)

    def update(self, alphas: Tensor, *state: Tensor) -> State:
        return (state[0] + alphas,)

    def forward(self, query: Tensor, projected: Tensor, *state: Tensor) -> Tensor:
        (coverage,) = state  # (B, R, L)
        covered = self.project_query(query).unsqueeze(2) + coverage.unsqueeze(-1) * self.coverage_weight
        hidden = torch.tanh(projected.unsqueeze(1) + covered.to(projected.dtype))  # (B, R, L, A)
        return self.output(hidden).squeeze(-1)
