"""Estimators of the alphas' gradient from draws of locations (Eq. 11-12), one class each.

REINFORCE: the gradient of E_s[log p(y | s, a)] with respect to the alphas is the mean over draws of

    sum_t (R_t - b_t) * d log p(s_t | a)

R_t must contain the log-probability of the words that s_t can influence; b_t may be anything that does not depend on
s_t. Other words in R_t, and the choice of b_t, affect only the variance. Names that the paper lacks come from
reinforcement learning: the *reward* of a step is the log-probability of its word, the *return* R_t a sum of rewards,
and the *advantage* R_t - b_t.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from captioning.component import Component
from captioning.errors import InputError, check_range, check_whole
from captioning.objective.processes import sum_over_processes

_AVERAGES = 50  # each of the first 49 steps has its own; all later steps share the last


class LearningSignal(NamedTuple):
    """The factors of d log p in REINFORCE, without gradient: (N, T) in nats for locations, (N,) for sampled captions.

    Attributes:
        returns: R_t.
        baseline: b_t.
        advantages: R_t - b_t, 0 where a step does not exist or its location was not drawn.
        drawn: bool, True where a step exists and its location was drawn; False where the context is an expectation.
    """

    returns: Tensor
    baseline: Tensor
    advantages: Tensor
    drawn: Tensor

    def means(self) -> dict[str, Tensor]:
        """Return means over the draws of all processes, nan if there was no draw. "reward" is the mean return."""
        count = self.drawn.sum()
        sums = [(values * self.drawn).sum() for values in (self.returns, self.baseline, self.advantages)]
        *sums, count = sum_over_processes(torch.stack([*sums, count]))
        reward, baseline, advantage = (value_sum / count for value_sum in sums)
        squares = sum_over_processes(((self.advantages - advantage) ** 2 * self.drawn).sum())
        return {"reward": reward, "baseline": baseline, "advantage_std": (squares / count).sqrt()}


class Estimator(Component):
    """The return R_t of a draw, and the baseline b_t that is subtracted from it.

    Attributes:
        samples: Draws per caption. The draws of a caption are adjacent among the N rows.
        to_go: Whether R_t sums the rewards from step t on, which s_t can influence, or all rewards of the caption.
    """

    samples: int = 1
    to_go = False

    def forward(self, rewards: Tensor, mask: Tensor, drawn: Tensor) -> LearningSignal:
        """Return the learning signal of one training batch.

        Args:
            rewards: (N, T), log p(y_t | s, a) of the true words in nats; 0 at steps that do not exist.
            mask: (N, T) bool, True where a step exists.
            drawn: (N, T) bool, as in ``LearningSignal``.
        """
        rewards = rewards.detach() * mask
        returns = self.returns(rewards, mask)
        baseline = self.baseline(returns, rewards, mask, drawn)
        return LearningSignal(returns, baseline, (returns - baseline) * drawn, drawn)

    def returns(self, rewards: Tensor, mask: Tensor) -> Tensor:
        """Return R_t of rewards (N, T)."""
        if self.to_go:
            return rewards.flip(1).cumsum(dim=1).flip(1)
        return rewards.sum(dim=1, keepdim=True).expand_as(rewards)

    def baseline(self, returns: Tensor, rewards: Tensor, mask: Tensor, drawn: Tensor) -> Tensor:
        """Return b_t (N, T), 0 in this class. ``drawn`` is as in ``LearningSignal``; no argument has a gradient."""
        return torch.zeros_like(returns)


class MovingAverage(Estimator):
    """b_k = decay b_{k-1} + (1 - decay) times the mean return of the captions with draws in batch k (Sec. 4.1).

    By default R_t sums the rewards from step t on, every step has an average of its rewards, and b_t sums the averages
    from step t to the end of the caption. With ``per_step`` and ``to_go`` false, R_t and b_t are the paper's: R_t is
    log p(y | s, a), and b_t its average, one number for all captions and steps. The first batch has the baseline 0,
    because its own mean depends on its draws. The averages start with that mean.

    Args:
        decay: Fraction of the old averages that is kept at each training batch.
        per_step: Whether every step of a caption has its own average; the steps from the 50th on share one.
        to_go: Whether R_t sums the rewards from step t on instead of all rewards of the caption. It needs ``per_step``:
            one average cannot follow returns to go, which shrink along the caption.
    """

    averages: Tensor

    def __init__(self, decay: float = 0.9, *, per_step: bool = True, to_go: bool = True) -> None:
        super().__init__()
        check_range(0, 0.999999, decay=decay)
        if to_go and not per_step:
            raise InputError("per_step: false needs to_go: false: one average cannot follow shrinking returns to go")
        self.decay = decay
        self.per_step = per_step
        self.to_go = to_go
        self.register_buffer("averages", torch.full((_AVERAGES if per_step else 1,), float("nan")))

    def baseline(self, returns: Tensor, rewards: Tensor, mask: Tensor, drawn: Tensor) -> Tensor:
        # (N, T) with an average per step; else (N, 1), so that a caption counts once, however long it is.
        values = rewards if self.per_step else returns[:, :1]
        drawn = drawn[:, : values.shape[1]]
        b = self.averages.nan_to_num()  # b_{k-1}
        average_index = torch.arange(values.shape[1], device=values.device).clamp(max=len(b) - 1)
        sums = torch.stack(((values * drawn).sum(dim=0), drawn.sum(dim=0))).to(b.dtype)
        sums = b.new_zeros(2, len(b)).index_add(1, average_index, sums)
        value_sum, count = sum_over_processes(sums)  # so that all processes keep the same averages
        mean = value_sum / count  # nan where nothing was drawn
        averages = torch.where(self.averages.isnan(), mean, self.decay * self.averages + (1 - self.decay) * mean)
        self.averages = torch.where(count > 0, averages, self.averages)
        return self.returns(b[average_index] * mask, mask) if self.per_step else b.expand_as(returns)


class ArcticMovingAverage(MovingAverage):
    """The authors' code: R_t is the mean reward of the caption's words, and the average starts at 0.

    Captions whose contexts are expectations count in the average, too.
    """

    def __init__(self, decay: float = 0.9) -> None:
        super().__init__(decay, per_step=False, to_go=False)
        self.averages.zero_()

    def returns(self, rewards: Tensor, mask: Tensor) -> Tensor:
        return super().returns(rewards, mask) / mask.sum(dim=1, keepdim=True).clamp(min=1)

    def baseline(self, returns: Tensor, rewards: Tensor, mask: Tensor, drawn: Tensor) -> Tensor:
        return super().baseline(returns, rewards, mask, mask)


class LeaveOneOut(Estimator):
    """b_t is the mean return of the caption's other draws: low for difficult captions (Kool et al. 2019).

    Args:
        samples: Draws of every caption, at least 2; the decoder runs over all of them.
        to_go: Whether R_t sums the rewards from step t on instead of all rewards of the caption.
    """

    def __init__(self, samples: int = 4, *, to_go: bool = True) -> None:
        super().__init__()
        check_whole(2, **{"LeaveOneOut.samples": samples})
        self.samples = samples
        self.to_go = to_go

    def baseline(self, returns: Tensor, rewards: Tensor, mask: Tensor, drawn: Tensor) -> Tensor:
        return leave_one_out(returns, self.samples)


def leave_one_out(values: Tensor, samples: int) -> Tensor:
    """Return, for each of N values (N, ..), the mean of the other values in its group of S adjacent values."""
    groups = values.unflatten(0, (-1, samples))  # (N / S, S, ..)
    return ((groups.sum(dim=1, keepdim=True) - groups) / (samples - 1)).flatten(0, 1)
