"""Lower bounds on the likelihood of stochastic attention, estimated by draws."""

import math

import torch

from captioning.attention import Memory
from captioning.data.batch import CaptionBatch
from captioning.model import Captioner
from captioning.objective.reductions import step_log_probs


@torch.no_grad()
def likelihood_bounds(captioner: Captioner, batch: CaptionBatch, memory: Memory, draws: int) -> tuple[float, float]:
    """Return two lower bounds on log p(y | a) in nats, summed over captions, by S draws of the locations.

    The first is L_s = E_s[log p(y | s, a)], Eq. 10. The second, E[log 1/S sum_k p(y | s_k, a)] (Burda et al. 2016), is
    at least L_s, and tighter with more draws. As draws come from p(s | a), their importance weight is p(y | s, a).
    """
    with captioner.decoder.attention.in_context_mode("sample"):
        # One draw after the other: the logits of all draws at once would fill the device's memory.
        outputs = (captioner.teacher_force(batch, memory) for _ in range(draws))
        word_log_probs = (step_log_probs(output.logits, output.targets, output.mask) for output in outputs)
        log_probs = torch.stack([log_probs.sum(dim=1) for log_probs in word_log_probs]).double()  # (S, N)
    tighter_bound = log_probs.logsumexp(dim=0) - math.log(draws)
    return float(log_probs.mean(dim=0).sum()), float(tighter_bound.sum())
