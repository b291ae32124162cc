"""How the terms of the objective are averaged over a batch: per word, or as in the authors' code."""

import torch
from torch import Tensor

from captioning.component import Component
from captioning.objective.processes import process_count, relative_size
from captioning.precision import at_least_float32


def step_nll(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return -log p of the target words in nats, at least float32: logits (M, V), targets (M,) -> (M,).

    ``label_smoothing`` is the fraction of the target probability that is spread evenly over the vocabulary.
    """
    logits = at_least_float32(logits)
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)


def step_log_probs(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Return log p of targets (M,) for logits (M, V) as (N, T): 0 where ``mask`` (N, T) has no step. In nats."""
    log_probs = -step_nll(logits, targets)
    return torch.zeros(mask.shape, dtype=log_probs.dtype, device=mask.device).masked_scatter(mask, log_probs)


def doubly_stochastic_penalty(alphas: Tensor, exists: Tensor | None = None) -> Tensor:
    """Return sum_i (1 - sum_t alpha_ti)^2 of Eq. 14 as a **mean over captions and over existing locations**.

    It is scaled like the NLL per word: T steps spread evenly over L locations cost (1 - T/L)^2. A weight w here is
    lambda = w T/L in the paper, which sums the penalty over L locations and the NLL over T words, and
    alpha_c = w T/B in the authors' code, which averages the penalty over L and sums it over B captions.

    Args:
        alphas: (N, T, L), 0 at steps that do not exist.
        exists: (N, L) bool, True where a location exists; None when all do.
    """
    residual = (1.0 - at_least_float32(alphas).sum(dim=1)) ** 2  # (N, L)
    if exists is None:
        return residual.mean()
    return ((residual * exists).sum(dim=1) / exists.sum(dim=1)).mean()


def step_entropy(alphas: Tensor) -> Tensor:
    """Return the entropy of alphas (N, T, L) in nats, (N, T), from 0 (one location) to log L (uniform)."""
    alphas = at_least_float32(alphas)
    # The gradient of x log x is infinite at 0, as at masked locations.
    return torch.special.entr(torch.where(alphas > 0, alphas, 1.0)).sum(dim=-1)


class Reduction(Component):
    """Reduces each term of the objective to a scalar: here to its mean **per word** or per caption.

    A weight therefore means the same at any batch size. With several processes, the mean of their results is the term
    of the whole batch. With ``reward_weight`` 1, and without penalty and entropy, the loss has the gradient of the
    negative bound L_s per word (Eq. 10-12).
    """

    def nll(self, logits: Tensor, targets: Tensor, mask: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        """Return -log p(y | s, a) in nats per **word**, <end> included; arguments as in ``step_log_probs``.

        The paper sums over the words of a caption; for captions of one length the two differ by a constant factor.
        """
        nll = step_nll(logits, targets, label_smoothing).mean()
        return nll * relative_size(len(targets), mask.device)

    def penalty(self, alphas: Tensor, exists: Tensor | None, *, stochastic: bool) -> Tensor:
        """Return ``doubly_stochastic_penalty``. ``stochastic`` says whether locations may be drawn."""
        return doubly_stochastic_penalty(alphas, exists) * relative_size(len(alphas), alphas.device)

    def reduce_steps(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return the mean over existing steps of values (N, T), which are 0 at all other steps."""
        return values.sum() / mask.sum() * relative_size(mask.sum(), mask.device)


class ArcticReduction(Reduction):
    """The authors' code: the NLL summed over time and averaged over the batch, all else summed over the batch.

    The penalty is the sum over the batch of the mean over locations. Where locations are drawn, the penalty has no
    gradient, because the authors' code overwrites the gradient of the alphas by that of REINFORCE. REINFORCE and
    entropy are plain sums, so their weights grow with the batch size.
    """

    def nll(self, logits: Tensor, targets: Tensor, mask: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        nll = step_nll(logits, targets, label_smoothing).mean() * len(targets) / len(mask)
        return nll * relative_size(len(mask), mask.device)

    def penalty(self, alphas: Tensor, exists: Tensor | None, *, stochastic: bool) -> Tensor:
        penalty = doubly_stochastic_penalty(alphas, exists) * len(alphas) * process_count()
        return penalty.detach() if stochastic else penalty

    def reduce_steps(self, values: Tensor, mask: Tensor) -> Tensor:
        return values.sum() * process_count()
