"""How logits become alphas, Eq. 5: the paper's softmax, and two relatives that give most locations exactly 0.

All three are a-entmax (Peters et al. 2019), argmax_p <p, e> + H_a(p) over the probabilities p, where H_a is
Tsallis' entropy: a = 1 is the softmax, a = 2 sparsemax (Martins & Astudillo 2016). The locations whose alpha is above 0
are the *support*.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from captioning.component import Component
from captioning.precision import at_least_float32


class Normalizer(Component):
    """A map from logits to alphas. It has no parameters.

    Attributes:
        sparse: Whether alphas may be 0 at locations that exist.
    """

    sparse = False

    @abstractmethod
    def forward(self, logits: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return alphas and their logarithms, (.., L), at least float32.

        Alphas sum to 1. They are 0, and their logarithms -inf without a gradient, at masked locations and outside the
        support.

        Args:
            logits: (.., L).
            mask: bool, broadcastable to ``logits``, True where a location exists; None when all do. A row whose
                locations are all masked becomes NaN.
        """


class Softmax(Normalizer):
    """alpha_i = exp(e_i) / sum_k exp(e_k), Eq. 5: every location that exists gets some weight."""

    def forward(self, logits: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        log_alphas = masked_log_softmax(logits, mask)
        return log_alphas.exp(), log_alphas


class SparseNormalizer(Normalizer):
    """alpha_i = max((a - 1) e_i - tau, 0)^(1 / (a - 1)), with the tau for which alphas sum to 1 (Peters et al. 2019).

    Attributes:
        a: The exponent of the entropy H_a, above 1.
    """

    sparse = True
    a: float

    def forward(self, logits: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        alphas = _Entmax.apply(_mask_logits(logits, mask), self.a, self.thresholds)
        support = alphas > 0
        return alphas, torch.where(support, alphas, 1.0).log().masked_fill(~support, -math.inf)

    @staticmethod
    @abstractmethod
    def thresholds(ranked: Tensor, k: Tensor) -> Tensor:
        """Return the thresholds tau (.., L) of supports that are the k largest logits, k = 1 .. L (L,).

        ``ranked`` (.., L) is (a - 1) e, descending. The true support has the largest k whose tau is below entry k.
        """


class Sparsemax(SparseNormalizer):
    """alpha_i = max(e_i - tau, 0): the probabilities nearest to the logits (Martins & Astudillo 2016, Eq. 2)."""

    a = 2.0

    @staticmethod
    def thresholds(ranked: Tensor, k: Tensor) -> Tensor:
        return (ranked.cumsum(-1) - 1) / k  # Algorithm 1, Martins & Astudillo 2016


class Entmax15(SparseNormalizer):
    """alpha_i = max(e_i / 2 - tau, 0)^2: 1.5-entmax, between softmax and sparsemax (Peters et al. 2019)."""

    a = 1.5

    @staticmethod
    def thresholds(ranked: Tensor, k: Tensor) -> Tensor:
        # Peters et al. 2019: the smaller root of sum_{i <= k} (x_i - tau)^2 = 1
        mean = ranked.cumsum(-1) / k
        spread = ranked.square().cumsum(-1) - k * mean.square()
        return mean - ((1 - spread) / k).clamp(min=0).sqrt()


class _Entmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, a: float, thresholds: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        x = (a - 1) * (logits - logits.amax(-1, keepdim=True))  # alphas do not change if a constant is subtracted
        # Alphas are at most 1, so entries below -1 are outside the support. Clamping at -2 keeps sums precise.
        ranked = x.clamp(min=-2).sort(dim=-1, descending=True).values
        k = torch.arange(1, ranked.shape[-1] + 1, device=ranked.device, dtype=ranked.dtype)
        tau = thresholds(ranked, k)
        support_size = (ranked > tau).sum(-1, keepdim=True).clamp(min=1)  # 0 for NaN logits without the clamp
        alphas = (x - tau.gather(-1, support_size - 1)).clamp(min=0) ** (1 / (a - 1))
        ctx.a = a
        ctx.save_for_backward(alphas)
        return alphas

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The Jacobian is diag(s) - s s^T / sum(s), with s_i = alpha_i^(2 - a) in the support (Peters et al. 2019)."""
        (alphas,) = ctx.saved_tensors
        s = torch.where(alphas > 0, alphas ** (2 - ctx.a), 0.0)
        return s * (gradient - (s * gradient).sum(-1, keepdim=True) / s.sum(-1, keepdim=True)), None, None


def masked_log_softmax(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return log-softmax over the last axis, at least float32; ``mask`` is as in ``Normalizer.forward``."""
    return torch.log_softmax(_mask_logits(logits, mask), dim=-1)


def _mask_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return logits (.., L) at least in float32, -inf where ``mask`` is False."""
    logits = at_least_float32(logits)
    return logits if mask is None else logits.masked_fill(~mask, -math.inf)
