"""Deterministic attention: the expectation over locations (Sec. 4.2), and the control that does not look."""

from __future__ import annotations

import torch
from torch import Tensor

from captioning.attention.base import Attention, AttentionOutput, Memory, Score, expected_context, masked_log_softmax
from captioning.kernels.dropout import Dropout


class SoftAttention(Attention):
    """z_t = sum_i alpha_ti a_i, Eq. 13.

    Args:
        score: gives the logits that alphas are the softmax of.
        dropout: probability of dropping a location's weight in training; those that stay are divided by 1 - dropout
            (Vaswani et al. 2017). The alphas that are reported, and penalised, are those before dropping.
    """

    def __init__(self, score: Score, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.score = score
        self.dropout = Dropout(dropout)

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        assert self.score is not None
        images = memory.annotations.shape[0]
        logits = self.score(query.unflatten(0, (images, -1)), memory.projected)  # (B, R, L)
        mask = None if memory.mask is None else memory.mask.unsqueeze(1)
        log_alphas = masked_log_softmax(logits, mask)
        alphas = log_alphas.exp()
        weights = self.dropout(alphas)
        context = expected_context(weights, memory.annotations)
        return AttentionOutput(context, alphas.flatten(0, 1), weights.flatten(0, 1), log_alphas.flatten(0, 1))


class UniformAttention(Attention):
    """The control without attention: every step sees the mean annotation.

    Shows what attention is worth: the same decoder, the same features, no choice of where to look.
    """

    def __init__(self) -> None:
        super().__init__()
        self.score = None

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        images, locations, _ = memory.annotations.shape
        rows = query.shape[0] // images
        mask = None if memory.mask is None else memory.mask.unsqueeze(1)
        logits = torch.zeros(images, rows, locations, device=query.device)
        log_alphas = masked_log_softmax(logits, mask)
        alphas = log_alphas.exp()
        context = expected_context(alphas, memory.annotations)
        alphas = alphas.flatten(0, 1)
        return AttentionOutput(context, alphas, alphas, log_alphas.flatten(0, 1))
