"""The LSTM cell, Eq. 1-3: the plain formula, and one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from captioning.kernels import native


def plain_lstm_cell(embedded: Tensor, hidden: Tensor, context: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return h_t in the type of the gates' summands, and c_t in the type of c_{t-1}. The reference.

    Args:
        embedded, hidden, context: (N, 4H), the summands of the gates i, f, o, g that come from the word, from h_{t-1}
            and from the context z_t; Eq. 1 is linear in them.
        c: (N, H), c_{t-1}.
    """
    i, f, o, g = (embedded + hidden + context).to(c.dtype).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)  # Eq. 2
    return (torch.sigmoid(o) * torch.tanh(c)).to(hidden.dtype), c  # Eq. 3


def lstm_cell(embedded: Tensor, hidden: Tensor, context: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``plain_lstm_cell``, by a kernel if there is one for the device and the type."""
    one_type = embedded.dtype == hidden.dtype == context.dtype and c.dtype == torch.float32
    if torch.compiler.is_compiling() or not one_type or not native.usable(hidden):
        return plain_lstm_cell(embedded, hidden, context, c)
    return _LSTMCell.apply(embedded, hidden, context, c)


class _LSTMCell(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embedded: Tensor, hidden: Tensor, context: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        if embedded.stride(1) != 1:
            embedded = embedded.contiguous()
        hidden, context, c = hidden.contiguous(), context.contiguous(), c.contiguous()
        N, H = c.shape
        activations = torch.empty(N, 4 * H, dtype=torch.float32)
        h, c_new = torch.empty(N, H, dtype=hidden.dtype), torch.empty(N, H, dtype=torch.float32)
        arguments = (embedded, hidden, context, c, activations, h, c_new)
        native.call("lstm_forward", hidden.dtype, *arguments, N, H, embedded.stride(0))
        ctx.save_for_backward(activations, c, c_new)
        return h, c_new

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_h: Tensor, for_c_new: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        activations, c, c_new = ctx.saved_tensors
        N, H = c.shape
        for_gates, for_c = torch.empty(N, 4 * H, dtype=for_h.dtype), torch.empty(N, H, dtype=torch.float32)
        arguments = (activations, c, c_new, for_h.contiguous(), for_c_new.contiguous(), for_gates, for_c)
        native.call("lstm_backward", for_h.dtype, *arguments, N, H)
        return for_gates, for_gates, for_gates, for_c
