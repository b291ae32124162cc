"""Layers over the annotations, between encoder and decoder."""

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from captioning.cells import GridSize
from captioning.component import Component
from captioning.errors import InputError, check_range, check_size, check_whole


class AnnotationLayer(Component):
    """Maps an image's annotations to the ones that the decoder attends to.

    It is part of the decoder, so it can be trained on cached features of a frozen encoder.
    """

    @abstractmethod
    def build(self, annotation_dim: int, grid_size: GridSize) -> int:
        """Create the parameters for annotations of size D on a grid (height, width); return the output's size D'."""

    @abstractmethod
    def forward(self, annotations: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return annotations (B, L, D') for (B, L, D); a mask (B, L) bool is True where a location exists.

        Masked locations have no influence and are 0 in the result.
        """


class AnnotationAttention(AnnotationLayer):
    """Self-attention over the locations of an image: the encoder of Vaswani et al. 2017, over regions.

    Annotations are projected to d, and sines and cosines of their row and column are added, d / 2 channels each, as in
    DETR (Carion et al. 2020). Then come layers, each of multi-head self-attention and a perceptron. Layer normalization
    stands before both, and after the last layer.

    Args:
        dim: Size d, a multiple of 4 and of ``heads``; None for the annotations' size D.
        heads: Number of heads in every layer.
        layers: Number of layers.
        feedforward_dim: Width of the perceptron's hidden layer; None for 2 d.
        dropout: Probability of dropping a unit of the hidden layer and of both residual branches (Vaswani et al. 2017,
            Sec. 5.4). Attention weights are not dropped: that would rule out PyTorch's fused kernel.
    """

    def __init__(
        self,
        *,
        dim: int | None = None,
        heads: int = 8,
        layers: int = 1,
        feedforward_dim: int | None = None,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        check_whole(1, **{"AnnotationAttention: heads": heads, "AnnotationAttention: layers": layers})
        check_size(dim=dim, feedforward_dim=feedforward_dim)
        check_range(0, 0.99, dropout=dropout)
        self.dim = dim
        self.heads = heads
        self.layer_count = layers
        self.feedforward_dim = feedforward_dim
        self.dropout = dropout

    def build(self, annotation_dim: int, grid_size: GridSize) -> int:
        dim = annotation_dim if self.dim is None else self.dim
        if dim % self.heads or dim % 4:
            raise InputError(f"AnnotationAttention: dim {dim} must be a multiple of 4 and of its {self.heads} heads")
        self.projection = nn.Linear(annotation_dim, dim)
        self.register_buffer("positions", grid_positions(grid_size, dim), False)
        layer = nn.TransformerEncoderLayer(
            dim, self.heads, self.feedforward_dim or 2 * dim, self.dropout, batch_first=True, norm_first=True
        )
        layer.self_attn.dropout = 0.0
        self.layers = nn.TransformerEncoder(layer, self.layer_count, nn.LayerNorm(dim), enable_nested_tensor=False)
        for parameter in self.layers.parameters():  # without this, the layers would start as copies of one
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        return dim

    def forward(self, annotations: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.projection(annotations)  # (B, L, D')
        x = x + self.positions.to(x.dtype)
        x = self.layers(x, src_key_padding_mask=None if mask is None else ~mask)
        return x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)


def grid_positions(grid_size: GridSize, dim: int) -> Tensor:
    """Return (L, dim): the ``sinusoids`` of each location's row, then of its column, dim / 2 each."""
    height, width = grid_size
    rows, columns = (sinusoids(torch.arange(side), dim // 2) for side in grid_size)  # (side, dim / 2)
    rows, columns = rows.unsqueeze(1).expand(-1, width, -1), columns.unsqueeze(0).expand(height, -1, -1)
    return torch.cat([rows, columns], dim=2).flatten(0, 1)


def sinusoids(positions: Tensor, dim: int) -> Tensor:
    """Return (n, dim): the sines, then the cosines of n positions (Vaswani et al. 2017, Sec. 3.5).

    Sines and cosines have dim / 2 frequencies each. The wavelengths are a geometric series from 2 pi to 2 pi * 10,000
    positions.
    """
    frequencies = torch.exp(-math.log(10_000) * torch.arange(dim // 2, device=positions.device) / (dim // 2))
    angles = positions.unsqueeze(1) * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class AnnotationLSTM(AnnotationLayer):
    """Makes each annotation depend on all locations: a_i becomes [forward h_i; backward h_i].

    This is the bidirectional encoder of Bahdanau et al. 2015, over locations in row-major order instead of words;
    ``lstm_encoder`` in the authors' code.

    Args:
        hidden_dim: Size of each direction; the decoder sees annotations of twice that size.
    """

    def __init__(self, hidden_dim: int = 256) -> None:
        super().__init__()
        check_size(hidden_dim=hidden_dim)
        self.hidden_dim = hidden_dim

    def build(self, annotation_dim: int, grid_size: GridSize) -> int:
        self.lstm = nn.LSTM(annotation_dim, self.hidden_dim, batch_first=True, bidirectional=True)
        return 2 * self.hidden_dim

    def forward(self, annotations: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.lstm(annotations)[0]
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True).unsqueeze(-1)  # (B, L, 1), existing locations first
        ordered = annotations.gather(1, order.expand_as(annotations))
        packed = pack_padded_sequence(ordered, mask.sum(dim=1).cpu(), batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=mask.shape[1])
        return torch.zeros_like(h).scatter(1, order.expand_as(h), h)
