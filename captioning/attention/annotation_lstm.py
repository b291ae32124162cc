"""A bidirectional LSTM over the annotations: a stage between encoder and decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from captioning.attention.annotation_layer import AnnotationLayer
from captioning.component import check_size


class AnnotationLSTM(AnnotationLayer):
    """Lets every annotation know of the others: a_i becomes [forward h_i; backward h_i], read in row-major order.

    Bahdanau et al. 2015's bidirectional encoder, over locations instead of words; the authors' code has it as
    ``lstm_encoder``.

    Args:
        hidden_dim: size of each direction, so that the decoder sees annotations of twice that.
    """

    def __init__(self, hidden_dim: int = 256) -> None:
        super().__init__()
        check_size(hidden_dim=hidden_dim)
        self.hidden_dim = hidden_dim

    def build(self, annotation_dim: int, grid_size: tuple[int, int] | None = None) -> int:
        self.lstm = nn.LSTM(annotation_dim, self.hidden_dim, batch_first=True, bidirectional=True)
        return 2 * self.hidden_dim

    def forward(self, annotations: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return annotations (B, L, 2 * hidden_dim); masked ones are passed over, wherever they stand."""
        if mask is None:
            return self.lstm(annotations)[0]
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True).unsqueeze(-1)  # those that exist come first
        lengths = mask.sum(dim=1).cpu()
        moved = annotations.gather(1, order.expand_as(annotations))
        packed = pack_padded_sequence(moved, lengths, batch_first=True, enforce_sorted=False)
        read, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=mask.shape[1])
        return torch.zeros_like(read).scatter(1, order.expand_as(read), read)
