"""The terms of the training objective, Eq. 14. Every term is a mean, so a weight means the same at any batch size."""

from __future__ import annotations

import torch
from torch import Tensor


def token_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """Return log p(y_t | y_<t, a) of the target words in nats: logits (M, V), targets (M,) -> (M,) float32."""
    logits = logits.float()
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)


def caption_nll(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return -log p(y | a) in nats per **word** (<end> counts as one): the sum over all steps divided by their number.

    The paper sums over the words of a caption; within a batch of one length the two differ by that length alone.

    Args:
        logits: (M, V), the steps that exist and no others.
        targets: (M,) int64.
        label_smoothing: share of the target probability that is spread evenly over the vocabulary.
    """
    return torch.nn.functional.cross_entropy(logits.float(), targets, label_smoothing=label_smoothing)


def doubly_stochastic_penalty(alphas: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return sum_i (1 - sum_t alpha_ti)^2 of Eq. 14 as a **mean over captions and over existing locations**.

    The scale is that of the NLL per word: C steps spread evenly over L locations cost (1 - C/L)^2. The paper's own
    reduction, a sum over L beside the NLL summed over a caption's C words, is this one times L/C. The authors' code
    takes the mean over L and the sum over the batch beside the NLL's mean: its ``alpha_c`` is this weight times C/B.

    Args:
        alphas: (N, T, L), 0 at steps that do not exist.
        mask: (N, L) bool, True where a location exists; None when all do.
    """
    residual = (1.0 - alphas.float().sum(dim=1)) ** 2  # (N, L)
    if mask is None:
        return residual.mean()
    return ((residual * mask).sum(dim=1) / mask.sum(dim=1)).mean()


def attention_entropy(alphas: Tensor, mask: Tensor) -> Tensor:
    """Return the mean entropy of alphas (N, T, L) in nats over the steps where ``mask`` (N, T) is True.

    Between 0 (one location) and log L (no choice at all).
    """
    alphas = alphas.float()
    return torch.special.entr(alphas).sum(dim=-1)[mask].mean()
