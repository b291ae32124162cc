"""Score functions f_att(a_i, h_{t-1}), Eq. 4."""

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captioning.cells import GridSize
from captioning.component import Component
from captioning.errors import InputError, check_size
from captioning.kernels.products import additive_logits, image_product, plain_additive_logits
from captioning.linear import Linear
from captioning.trace import State


class Score(Component):
    """e_ti = f_att(a_i, h_{t-1}), Eq. 4.

    A score may carry tensors from step to step, such as the previous alphas: ``init_state`` makes them, ``forward``
    takes them as further arguments, and ``update`` returns those of the next step. Most scores carry nothing.

    Attributes:
        needs_softmax: Whether the logits are logarithms of weights, which only a softmax turns into the score's alphas.
    """

    needs_softmax = False

    @abstractmethod
    def build(self, annotation_dim: int, query_dim: int, grid_size: GridSize) -> None:
        """Create the parameters; arguments as in ``Attention.build``. Raises InputError if a size does not fit."""

    @abstractmethod
    def project(self, annotations: Tensor) -> Tensor:
        """Return everything that does not depend on the query, computed once per image: (B, L, A), or (B, A, L)."""

    @abstractmethod
    def forward(self, query: Tensor, projected: Tensor) -> Tensor:
        """Return logits (B, R, L) of queries (B, R, H) over projected annotations (B, L, A).

        A score with a state gets its tensors, (B, R, ..) each, as further arguments.
        """

    def init_state(self, exists: Tensor) -> State:
        """Return the first state, tensors (B, ..). ``exists`` (B, L) bool is True where a location exists."""
        return ()

    def update(self, alphas: Tensor, *state: Tensor) -> State:
        """Return the state of the next step after alphas (B, R, L)."""
        return state


class AdditiveScore(Score):
    """e_ti = v^T tanh(W_a a_i + b + W_h h_{t-1}), Eq. 4 with the paper's one-hidden-layer perceptron.

    A constant added to all scores does not change the softmax, so the output layer has no bias.

    Args:
        attention_dim: Width A of the hidden layer.
        fused: Whether to use a fused kernel if one supports the device and the type; otherwise PyTorch's operations.
    """

    def __init__(self, attention_dim: int = 512, *, fused: bool = True) -> None:
        super().__init__()
        check_size(attention_dim=attention_dim)
        self.attention_dim = attention_dim
        self._logits = additive_logits if fused else plain_additive_logits

    def build(self, annotation_dim: int, query_dim: int, grid_size: GridSize) -> None:
        self.annotation_projection = nn.Linear(annotation_dim, self.attention_dim)
        self.query_projection = Linear(query_dim, self.attention_dim, bias=False)
        self.output = nn.Linear(self.attention_dim, 1, bias=False)

    def project(self, annotations: Tensor) -> Tensor:
        return F.linear(annotations, self.annotation_projection.weight)  # without b, which project_query adds

    def project_query(self, query: Tensor) -> Tensor:
        """Return W_h h + b (B, R, A). Adding b to the few queries saves a pass over all annotations."""
        projected = self.query_projection(query)
        bias = self.annotation_projection.bias
        return projected if bias is None else projected + bias.to(projected.dtype)

    def forward(self, query: Tensor, projected: Tensor) -> Tensor:
        return self._logits(projected, self.project_query(query), self.output.weight[0])  # (B, R, L)


class ConcatScore(AdditiveScore):
    """e_ti = v^T tanh(W [h_{t-1}; a_i]) (Luong et al. 2015): ``AdditiveScore`` without a bias, with W = [W_h W_a]."""

    def build(self, annotation_dim: int, query_dim: int, grid_size: GridSize) -> None:
        super().build(annotation_dim, query_dim, grid_size)
        self.annotation_projection = nn.Linear(annotation_dim, self.attention_dim, bias=False)


class CoverageScore(AdditiveScore):
    """e_ti = v^T tanh(W_a a_i + b + W_h h_{t-1} + w_c c_ti) with c_ti = sum_{t' < t} alpha_t'i.

    Eq. 11 of See et al. 2017 (linguistic coverage of Tu et al. 2016, with the additive score). The sum of alphas
    differs between the captions of an image, so the hidden layer is computed for every caption and location, without
    a kernel. Arguments are as in ``AdditiveScore``.
    """

    def build(self, annotation_dim: int, query_dim: int, grid_size: GridSize) -> None:
        super().build(annotation_dim, query_dim, grid_size)
        self.coverage_weight = nn.Parameter(torch.zeros(self.attention_dim))  # starts as the additive score

    def init_state(self, exists: Tensor) -> State:
        return (torch.zeros_like(exists, dtype=torch.float32),)

    def update(self, alphas: Tensor, *state: Tensor) -> State:
        return (state[0] + alphas,)

    def forward(self, query: Tensor, projected: Tensor, *state: Tensor) -> Tensor:
        (coverage,) = state  # (B, R, L)
        summands = self.project_query(query).unsqueeze(2) + coverage.unsqueeze(-1) * self.coverage_weight
        hidden = torch.tanh(projected.unsqueeze(1) + summands.to(projected.dtype))  # (B, R, L, A)
        return self.output(hidden).squeeze(-1)


class DotScore(Score):
    """e_ti = a_i^T h_{t-1} (Luong et al. 2015). It has no parameters: annotations and queries must have one size."""

    def build(self, annotation_dim: int, query_dim: int, grid_size: GridSize) -> None:
        if annotation_dim != query_dim:
            raise InputError(
                f"{type(self).__name__} needs annotations and hidden state of one size, got {annotation_dim} and "
                f"hidden_dim {query_dim}; set the decoder's hidden_dim to {annotation_dim}, or choose a score with a "
                "projection: GeneralScore, or ScaledDotScore with attention_dim"
            )

    def project(self, annotations: Tensor) -> Tensor:
        return annotations.mT  # (B, D, L)

    def forward(self, query: Tensor, projected: Tensor) -> Tensor:
        return dot(query, projected)  # (B, R, L)


class GeneralScore(DotScore):
    """e_ti = a_i^T W h_{t-1} (Luong et al. 2015). a_i^T W is computed once per image: a step is one dot product."""

    def build(self, annotation_dim: int, query_dim: int, grid_size: GridSize) -> None:
        self.annotation_projection = nn.Linear(annotation_dim, query_dim, bias=False)

    def project(self, annotations: Tensor) -> Tensor:
        return self.annotation_projection(annotations).mT  # (B, H, L)


class ScaledDotScore(DotScore):
    """e_ti = (W_a a_i)^T (W_h h_{t-1}) / sqrt(A) (Vaswani et al. 2017); without projections a_i^T h_{t-1} / sqrt(D).

    Without the division, the logits would grow with the size, and the softmax would saturate.

    Args:
        attention_dim: Size A of both projections. None for no projections; annotations and queries must then have
            one size.
    """

    annotation_projection: nn.Module
    query_projection: nn.Module

    def __init__(self, attention_dim: int | None = None) -> None:
        super().__init__()
        check_size(attention_dim=attention_dim)
        self.attention_dim = attention_dim

    def build(self, annotation_dim: int, query_dim: int, grid_size: GridSize) -> None:
        if self.attention_dim is None:
            super().build(annotation_dim, query_dim, grid_size)
            self.annotation_projection = self.query_projection = nn.Identity()
        else:
            self.annotation_projection = nn.Linear(annotation_dim, self.attention_dim, bias=False)
            self.query_projection = Linear(query_dim, self.attention_dim, bias=False)

    def project(self, annotations: Tensor) -> Tensor:
        keys = self.annotation_projection(annotations)  # (B, L, A)
        return (keys * keys.shape[-1] ** -0.5).mT  # (B, A, L); scaled here, once

    def forward(self, query: Tensor, projected: Tensor) -> Tensor:
        return dot(self.query_projection(query), projected)


class CosineScore(ScaledDotScore):
    """e_ti = scale cos(W_a a_i, W_h h_{t-1}) with a learned scale: addressing by content (Graves et al. 2014, Eq. 5-6).

    Logits lie between -scale and scale, whatever the norms of annotations and query.

    Args:
        attention_dim: Size A of both projections.
    """

    def __init__(self, attention_dim: int = 512) -> None:
        super().__init__(attention_dim)

    def build(self, annotation_dim: int, query_dim: int, grid_size: GridSize) -> None:
        super().build(annotation_dim, query_dim, grid_size)
        self.scale = nn.Parameter(torch.tensor([10.0]))

    def project(self, annotations: Tensor) -> Tensor:
        return F.normalize(self.annotation_projection(annotations), dim=-1).mT  # (B, A, L)

    def forward(self, query: Tensor, projected: Tensor) -> Tensor:
        return self.scale * dot(F.normalize(self.query_projection(query), dim=-1), projected)


class LocationScore(Score):
    """e_t = W h_{t-1} (Luong et al. 2015): where to look depends on the state, not on the annotations."""

    def build(self, annotation_dim: int, query_dim: int, grid_size: GridSize) -> None:
        self.output = Linear(query_dim, grid_size[0] * grid_size[1], bias=False)

    def project(self, annotations: Tensor) -> Tensor:
        return annotations

    def forward(self, query: Tensor, projected: Tensor) -> Tensor:
        return self.output(query)


def dot(x: Tensor, vectors: Tensor) -> Tensor:
    """Return x (B, R, in) times vectors (B, in, out), image by image: (B, R, out), in the type of ``vectors``."""
    return image_product(x.to(vectors.dtype), vectors)
