"""Deterministic attention: the expectation over locations (Sec. 4.2), and the control that does not look."""

from __future__ import annotations

import torch
from torch import Tensor

from captioning.attention.base import Attention, AttentionOutput, Memory, Score, expected_context, masked_log_softmax


class SoftAttention(Attention):
    """z_t = sum_i alpha_ti a_i, Eq. 13.

    Args:
        score: gives the logits that alphas are the softmax of.
    """

    def __init__(self, score: Score) -> None:
        super().__init__()
        self.score = score

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        assert self.score is not None
        images = memory.annotations.shape[0]
        logits = self.score(query.unflatten(0, (images, -1)), memory.projected)  # (B, R, L)
        mask = None if memory.mask is None else memory.mask.unsqueeze(1)
        log_alphas = masked_log_softmax(logits, mask)
        alphas = log_alphas.exp()
        context = expected_context(alphas, memory.annotations)
        alphas = alphas.flatten(0, 1)
        return AttentionOutput(context, alphas, alphas, log_alphas.flatten(0, 1))


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
