"""Statistics of the alphas, and the cause if they no longer depend on the word."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from captioning.objective.reductions import step_entropy
from captioning.trace import AttentionTrace

PATIENCE = 500
"""Training batches before the first verdict: at the start every attention is uniform."""
MEMORY = 0.99
"""Fraction of the old means that is kept at each batch: they average over about 100 batches."""
LEAST_KL = 0.01
"""Smallest KL divergence in nats from word to word of alphas that depend on the word."""
_SOFT_FIRST = "start from a run with soft attention (`--init_from`)"


def attention_statistics(trace: AttentionTrace, mask: Tensor, *, sparse: bool = False) -> dict[str, Tensor]:
    """Return means over the steps that exist, as scalars.

    Args:
        trace: Trace of (N, T) steps, 0 at steps that do not exist.
        mask: (N, T) bool, True where a step exists.
        sparse: Whether to count the locations of the support.

    Returns:
        "attention_entropy" in nats; "max_alpha", the largest weight of a step; "step_kl", KL(alpha_t || alpha_t-1) in
        nats, from one word to the next; "beta" if the decoder has a gate;
        "support_size", the number of locations whose alpha is above 0, if ``sparse``.
    """
    alphas = trace.alphas.detach().float()
    steps = mask.sum()
    before, after = alphas[:, :-1], alphas[:, 1:]
    tiny = torch.finfo(alphas.dtype).tiny
    kl = (torch.special.xlogy(after, after) - after * before.clamp_min(tiny).log()).sum(dim=-1)  # (N, T-1)
    statistics = {
        "attention_entropy": (step_entropy(alphas) * mask).sum() / steps,
        "max_alpha": alphas.amax(dim=-1).sum() / steps,
        "step_kl": (kl * mask[:, 1:]).sum() / mask[:, 1:].sum().clamp_min(1),
    }
    if trace.betas is not None:
        statistics["beta"] = trace.betas.detach().float().sum() / steps
    if sparse:
        statistics["support_size"] = (alphas > 0).sum() / steps
    return statistics


class CollapseWatch:
    """Follows the statistics of training batches and names the cause if alphas no longer depend on the word.

    Args:
        draws: Whether attention draws locations; advice that has no effect on the attention is left out.
        estimated: Whether attention learns from its draws by REINFORCE.
    """

    def __init__(self, *, draws: bool = False, estimated: bool = False) -> None:
        self.draws = draws
        self.estimated = estimated
        self.batches = 0
        self.means: dict[str, Tensor] = {}

    def update(self, statistics: dict[str, Tensor], locations: Tensor | int) -> None:
        """Add ``attention_statistics`` of a batch whose images have ``locations`` locations, (B,) or one number."""
        self.batches += 1
        limit = torch.as_tensor(locations, dtype=torch.float32).log().mean()
        for name, value in (statistics | {"limit": limit}).items():
            self.means[name] = MEMORY * self.means.get(name, value) + (1 - MEMORY) * value

    def cause(self) -> str | None:
        """Return the problem and its remedy in one line; None if there is no problem, or too few batches to tell."""
        if self.batches < PATIENCE:
            return None
        entropy, largest, kl, limit = (
            float(self.means[name]) for name in ("attention_entropy", "max_alpha", "step_kl", "limit")
        )
        beta = float(self.means.get("beta", 1.0))
        if beta < 0.05:
            return (
                f"the gate is closed (mean beta {beta:.3f}): words ignore the image, and alphas learn nothing; "
                + self._advice(
                    "train with `gated: false`",
                    draws=f"draw less or later (`sample_probability`, `ramp`) or {_SOFT_FIRST}",
                    estimated="lower `reward_weight`",
                )
            )
        if kl > LEAST_KL or not math.isfinite(kl):
            return None
        problem = f"alphas do not depend on the word (KL from word to word {kl:.4f} nats)"
        if entropy > 0.95 * limit:
            return f"{problem}: they are uniform (entropy {entropy:.2f} of {limit:.2f} nats); " + self._advice(
                "lower `attention_penalty`",
                draws=f"lower `entropy_weight`, draw later (`ramp`) or {_SOFT_FIRST}",
                estimated="raise `reward_weight`",
            )
        if largest > 0.9:
            return f"{problem}: one location has all the weight (mean largest alpha {largest:.2f}); " + self._advice(
                "lower the learning rate", draws="raise `entropy_weight`, draw later (`ramp`)"
            )
        return f"{problem}: every word gets the same map; " + self._advice(
            "raise `attention_penalty`", estimated="raise `reward_weight`"
        )

    def _advice(self, always: str, *, draws: str = "", estimated: str = "") -> str:
        return ", or ".join(filter(None, (always, draws if self.draws else "", estimated if self.estimated else "")))
