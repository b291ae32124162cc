"""Statistics of the alphas, and a watch that names the cause when alphas stop depending on the word."""

import math

import torch
from torch import Tensor

from captioning.objective.reductions import step_entropy
from captioning.trace import AttentionTrace

PATIENCE = 500  # training batches before the first verdict: at the start every attention is uniform
DECAY = 0.99  # fraction of the old mean that each batch keeps; a mean covers about 100 batches
MIN_KL = 0.01  # below this KL divergence from word to word, in nats, alphas ignore the word


def attention_statistics(trace: AttentionTrace, mask: Tensor, *, sparse: bool = False) -> dict[str, Tensor]:
    """Return means over the steps that exist, as scalars.

    Args:
        trace: Trace of (N, T) steps; alphas and betas are 0 at steps that do not exist.
        mask: (N, T) bool, True where a step exists.
        sparse: Whether to return "support_size".

    Returns:
        "attention_entropy" in nats; "max_alpha", the largest weight of a step; "step_kl", KL(alpha_t || alpha_t-1) in
        nats; "beta" if the decoder has one; "support_size", the number of locations with alpha above 0, if ``sparse``.
    """
    alphas = trace.alphas.detach().float()
    step_count = mask.sum()
    q, p = alphas[:, :-1], alphas[:, 1:]  # alpha_{t-1}, alpha_t
    tiny = torch.finfo(alphas.dtype).tiny
    kl = (torch.special.xlogy(p, p) - p * q.clamp_min(tiny).log()).sum(dim=-1)  # (N, T-1)
    statistics = {
        "attention_entropy": (step_entropy(alphas) * mask).sum() / step_count,
        "max_alpha": alphas.amax(dim=-1).sum() / step_count,
        "step_kl": (kl * mask[:, 1:]).sum() / mask[:, 1:].sum().clamp_min(1),
    }
    if trace.betas is not None:
        statistics["beta"] = trace.betas.detach().float().sum() / step_count
    if sparse:
        statistics["support_size"] = (alphas > 0).sum() / step_count
    return statistics


class CollapseWatch:
    """Follows the statistics of training batches and names the cause if alphas no longer depend on the word."""

    def __init__(self) -> None:
        self.batches = 0
        self.means: dict[str, Tensor] = {}

    def update(self, statistics: dict[str, Tensor], location_count: Tensor | int) -> None:
        """Add ``attention_statistics`` of a batch; ``location_count`` is (B,), or one number for all images."""
        self.batches += 1
        max_entropy = torch.as_tensor(location_count, dtype=torch.float32).log().mean()
        for name, value in (statistics | {"max_entropy": max_entropy}).items():
            self.means[name] = DECAY * self.means.get(name, value) + (1 - DECAY) * value

    def diagnosis(self) -> str | None:
        """Return the problem and its remedies in one line; None if there is no problem, or too few batches to tell."""
        if self.batches < PATIENCE:
            return None
        means = {"beta": 1.0} | {name: float(mean) for name, mean in self.means.items()}
        if means["beta"] < 0.05:
            return (
                f"beta is {means['beta']:.3f} on average: words ignore the image, and alphas learn nothing; train with "
                "`gated: false`, or with drawn locations lower `reward_weight` or begin from a soft model"
            )
        if means["step_kl"] > MIN_KL or not math.isfinite(means["step_kl"]):
            return None
        if means["attention_entropy"] > 0.95 * means["max_entropy"]:
            cause = "they are uniform; lower `attention_penalty`, or with drawn locations `entropy_weight`"
        elif means["max_alpha"] > 0.9:
            cause = "one location has all the weight; lower the learning rate, or with drawn locations start them later"
        else:
            cause = "every word gets the same map; raise `attention_penalty`"
        return f"alphas do not depend on the word (KL from word to word {means['step_kl']:.4f} nats): {cause}"
