"""Statistics of attention against loops, and an example of every cause of collapse."""

from __future__ import annotations

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


def watch(
    logits: Tensor, beta: float = 0.5, batches: int = PATIENCE, locations: int | Tensor = L, draws: bool = False
) -> str | None:
    """Return the cause for batches whose alphas are the softmax of ``logits``, broadcast to (N, T, L)."""
    mask = make_mask()
    alphas = torch.softmax(logits.expand(N, T, L), -1) * mask.unsqueeze(-1)
    statistics = attention_statistics(AttentionTrace(alphas, torch.full((N, T), beta) * mask, None), mask)
    watcher = CollapseWatch(draws=draws, estimated=draws)
    for _ in range(batches):
        watcher.update(statistics, locations)
    return watcher.cause()


SHARP = 20.0 * torch.nn.functional.one_hot(torch.tensor(3), L)


@pytest.mark.parametrize(
    ("logits", "beta", "cause"),
    [
        (torch.zeros(L), 0.5, "they are uniform (entropy 2.20 of 2.20 nats)"),
        (SHARP, 0.5, "one location has all the weight (mean largest alpha 1.00)"),
        (torch.randn(N, 1, L, generator=torch.Generator().manual_seed(0)), 0.5, "every word gets the same map"),
        (3 * torch.randn(N, T, L), 0.01, "the gate is closed (mean beta 0.010)"),
    ],
)
def test_every_cause_is_named_with_its_remedy(logits, beta, cause):
    message = watch(logits, beta, draws=True)
    assert message is not None and cause in message
    assert any(option in message for option in ("`ramp`", "`reward_weight`"))
    deterministic = watch(logits, beta)
    assert deterministic is not None and cause in deterministic
    assert not any(option in deterministic for option in ("`ramp`", "weight`", "`sample_probability`", "`--init_from`"))
    if "uniform" in cause or "gate" in cause:
        assert "or start from a run with soft attention (`--init_from`)" in message


def test_attention_that_moves_from_word_to_word_gets_no_warning():
    assert watch(3 * torch.randn(N, T, L)) is None


def test_there_is_no_verdict_before_attention_had_time_to_learn():
    assert watch(torch.zeros(L), batches=PATIENCE - 1) is None


def test_uniform_is_judged_by_the_locations_that_exist():
    two = torch.zeros(L)
    two[2:] = float("-inf")
    assert "uniform" in watch(two, locations=torch.full((N,), 2))
    assert "the same map" in watch(two)


def test_the_past_is_forgotten():
    mask = make_mask()
    watcher = CollapseWatch()
    still = torch.full((N, T, L), 1 / L) * mask.unsqueeze(-1)
    moving = torch.softmax(3 * torch.randn(N, T, L), -1) * mask.unsqueeze(-1)
    for alphas in [still] * PATIENCE + [moving] * 20:
        watcher.update(attention_statistics(AttentionTrace(alphas, 0.5 * mask, None), mask), L)
    assert watcher.cause() is None
    assert math.isclose(float(watcher.means["beta"]), 0.5, rel_tol=1e-4)
