"""Local attention in two dimensions: a score restricted to a window around a predicted position."""

import math

import torch
from torch import Tensor

from captioning.attention.scores import Score
from captioning.cells import GridSize
from captioning.errors import InputError
from captioning.linear import Linear
from captioning.trace import State

_OUTSIDE = -1e3
"""Added to logits outside the window, whose weights underflow to exactly 0 in float32 and float64. The value is finite,
so that the softmax stays defined if no location in the window exists."""


class LocalScore(Score):
    """Luong et al. 2015's predictive local attention (local-p) in two dimensions, around any score e_ti.

    At every step a position p_t = (height, width) * sigmoid(V tanh(W h_{t-1})) is predicted, and

        alpha_ti ~ exp(e_ti) exp(-(r_i - p_r)^2 / (2 s_r^2) - (c_i - p_c)^2 / (2 s_c^2))

    for locations i at most ``window`` away, 0 for others; s = window / 2. The Gaussian's logarithm is added to the
    logits, so that every selection works and the position gets a gradient. Positions are measured in locations from
    the upper left corner; r_i and c_i are the centers of cells, the first at 0.5.

    Differs from the paper, which multiplies the softmax by the Gaussian and leaves a sum below 1: here the product is
    divided by its sum, so that alphas are probabilities.

    Args:
        score: The score within the window.
        window: Half the window's (height, width) in locations, Luong's D. Both are at least 0.5, so that the window
            always contains a location.
    """

    needs_softmax = True

    centers: Tensor
    grid_height_width: Tensor
    half_window: Tensor

    def __init__(self, score: Score, *, window: tuple[float, float] = (3.0, 3.0)) -> None:
        super().__init__()
        if len(window) != 2 or not all(0.5 <= side < math.inf for side in window):
            raise InputError(f"window must be (height, width), each at least 0.5 locations, got {window}")
        self.score = score
        self.window = tuple(window)

    def build(self, annotation_dim: int, query_dim: int, grid_size: GridSize) -> None:
        self.score.build(annotation_dim, query_dim, grid_size)
        self.position_hidden = Linear(query_dim, query_dim, bias=False)
        self.position_output = Linear(query_dim, 2, bias=False)
        y, x = torch.meshgrid(*(torch.arange(size) + 0.5 for size in grid_size), indexing="ij")
        centers = torch.stack([y.flatten(), x.flatten()])  # (2, L)
        # Persistent, so that a checkpoint of another grid is refused.
        self.register_buffer("centers", centers)
        self.register_buffer("grid_height_width", torch.tensor(grid_size).to(centers), persistent=False)
        self.register_buffer("half_window", torch.tensor(self.window).to(centers).unsqueeze(-1), persistent=False)

    def position(self, query: Tensor) -> Tensor:
        """Return p_t (.., 2) of queries (.., H): row and column, in locations from the upper left corner."""
        hidden = torch.tanh(self.position_hidden(query))
        return self.grid_height_width * torch.sigmoid(self.position_output(hidden).to(self.grid_height_width.dtype))

    def project(self, annotations: Tensor) -> Tensor:
        return self.score.project(annotations)

    def init_state(self, exists: Tensor) -> State:
        return self.score.init_state(exists)

    def update(self, alphas: Tensor, *state: Tensor) -> State:
        return self.score.update(alphas, *state)

    def forward(self, query: Tensor, projected: Tensor, *state: Tensor) -> Tensor:
        logits = self.score(query, projected, *state)  # (B, R, L)
        offset = self.centers - self.position(query).unsqueeze(-1)  # (B, R, 2, L)
        offset = offset / self.half_window  # in units of ``window``
        gaussian = -2 * offset.square().sum(dim=-2)  # the Gaussian's logarithm, with s = ``window`` / 2
        outside = (offset.abs() > 1).any(dim=-2)
        return logits + gaussian.masked_fill(outside, _OUTSIDE)
