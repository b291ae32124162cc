"""The training objective, Eq. 14. Every term is a mean over captions, so that it means the same at any batch size."""

from __future__ import annotations

import torch
from torch import Tensor

from captioning.decoder import DecoderOutput


def token_log_probs(output: DecoderOutput) -> Tensor:
    """Return log p(y_t | y_<t, a) of the target words, (M,) float32, in nats."""
    logits = output.logits.float()
    return logits.gather(-1, output.targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)


def caption_nll(output: DecoderOutput, *, label_smoothing: float = 0.0) -> Tensor:
    """Return -log p(y | a) in nats per **word** (<end> counts as one): the sum over all steps divided by their number.

    The paper sums over the words of a caption; within batches of one length the two differ by that length alone.

    Args:
        label_smoothing: share of the target probability spread evenly over the vocabulary.
    """
    return torch.nn.functional.cross_entropy(output.logits.float(), output.targets, label_smoothing=label_smoothing)


def doubly_stochastic_penalty(alphas: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the attention penalty of Eq. 14: sum_i (1 - sum_t alpha_ti)^2, **mean over captions and locations**.

    A decoder that spreads C steps evenly over L locations pays (1 - C/L)^2. The authors' code sums over the batch and
    takes the mean over locations; with B captions its ``alpha_c`` is B times this function's weight.

    Args:
        alphas: (N, T, L), 0 at steps that do not exist.
        mask: (N, L) bool of the locations that exist, or None.
    """
    residual = (1.0 - alphas.float().sum(dim=1)) ** 2  # (N, L)
    if mask is None:
        return residual.mean()
    return ((residual * mask).sum(dim=1) / mask.sum(dim=1)).mean()
