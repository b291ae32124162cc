"""Statistics of attention against loops, and an example of every cause of collapse."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from captioning.objective.collapse import PATIENCE, CollapseWatch, attention_statistics
from captioning.trace import AttentionTrace

N, T, L = 4, 6, 9


def make_mask() -> Tensor:
    return torch.arange(T) < torch.tensor([6, 4, 1, 5]).unsqueeze(1)


def test_statistics_equal_a_loop_over_captions_and_steps():
    mask = make_mask()
    alphas = torch.softmax(3 * torch.randn(N, T, L), -1) * mask.unsqueeze(-1)
    betas = torch.rand(N, T) * mask
    statistics = attention_statistics(AttentionTrace(alphas, betas, None), mask)
    entropy, largest, kl = [], [], []
    for n in range(N):
        for t in range(int(mask[n].sum())):
            a = alphas[n, t].numpy().astype(np.float64)
            entropy.append(-(a * np.log(a)).sum())
            largest.append(a.max())
            if t:
                before = alphas[n, t - 1].numpy().astype(np.float64)
                kl.append((a * np.log(a / before)).sum())
    assert float(statistics["attention_entropy"]) == pytest.approx(np.mean(entropy), abs=1e-5)
    assert float(statistics["max_alpha"]) == pytest.approx(np.mean(largest), abs=1e-5)
    assert float(statistics["step_kl"]) == pytest.approx(np.mean(kl), abs=1e-5)
    assert float(statistics["beta"]) == pytest.approx(float(betas[mask].mean()), abs=1e-6)


def test_support_size_is_the_mean_number_of_locations_with_a_weight():
    mask = make_mask()
    alphas = torch.zeros(N, T, L)
    alphas[..., :2] = 0.5
    alphas[0, 0, :4] = 0.25
    trace = AttentionTrace(alphas * mask.unsqueeze(-1), None, None)
    steps = int(mask.sum())
    assert float(attention_statistics(trace, mask, sparse=True)["support_size"]) == pytest.approx(2 + 2 / steps)
    assert "support_size" not in attention_statistics(trace, mask)


def test_statistics_of_alphas_that_are_exactly_zero_are_finite():
    alphas = torch.nn.functional.one_hot(torch.randint(L, (N, T)), L).float()
    statistics = attention_statistics(AttentionTrace(alphas, None, None), torch.ones(N, T, dtype=torch.bool))
    assert all(torch.isfinite(value) for value in statistics.values())
    assert float(statistics["attention_entropy"]) == 0.0 and float(statistics["step_kl"]) > 10


UNIFORM = torch.full((N, T, L), 1 / L)
ONE = torch.nn.functional.one_hot(torch.zeros(N, T, dtype=torch.int64), L).float()
SAME = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1, 0, 0, 0, 0]).expand(N, T, L)


def watched(alphas: Tensor, beta: float = 0.5, batches: int = PATIENCE, *, locations: int = L) -> CollapseWatch:
    watch, mask = CollapseWatch(), make_mask()
    trace = AttentionTrace(alphas * mask.unsqueeze(-1), torch.full((N, T), beta) * mask, None)
    for _ in range(batches):
        watch.update(attention_statistics(trace, mask), locations)
    return watch


@pytest.mark.parametrize(
    ("alphas", "beta", "cause"),
    [
        (UNIFORM, 0.5, "they are uniform"),
        (ONE, 0.5, "one location has all the weight"),
        (SAME, 0.5, "every word gets the same map"),
        (SAME, 0.01, "beta is 0.010 on average: words ignore the image"),
    ],
)
def test_every_cause_of_collapse_is_named_after_the_first_batches(alphas, beta, cause):
    assert cause in str(watched(alphas, beta).diagnosis())
    assert watched(alphas, beta, PATIENCE - 1).diagnosis() is None


def test_only_existing_locations_count_for_uniform_alphas_and_changing_alphas_are_no_collapse():
    assert "every word gets the same map" in str(watched(UNIFORM, locations=10 * L).diagnosis())
    assert watched(torch.softmax(3 * torch.randn(N, T, L), -1)).diagnosis() is None


def test_old_batches_lose_their_weight_in_the_means():
    mask = make_mask()
    watcher = CollapseWatch()
    still = torch.full((N, T, L), 1 / L) * mask.unsqueeze(-1)
    moving = torch.softmax(3 * torch.randn(N, T, L), -1) * mask.unsqueeze(-1)
    for alphas in [still] * PATIENCE + [moving] * 20:
        watcher.update(attention_statistics(AttentionTrace(alphas, 0.5 * mask, None), mask), L)
    assert watcher.diagnosis() is None
    assert math.isclose(float(watcher.means["beta"]), 0.5, rel_tol=1e-4)
