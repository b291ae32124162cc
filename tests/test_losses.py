from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from captioning.objective.reductions import caption_nll, doubly_stochastic_penalty, step_entropy, token_log_probs

N, T, L, V, M = 3, 4, 5, 7, 9


def test_nll_is_the_mean_negative_log_probability_of_the_targets():
    logits, targets = torch.randn(M, V), torch.randint(V, (M,))
    expected = -np.mean(
        [math.log(math.exp(x[y]) / sum(map(math.exp, x))) for x, y in zip(logits.tolist(), targets, strict=True)]
    )
    assert caption_nll(logits, targets).item() == pytest.approx(expected, abs=1e-6)
    assert -token_log_probs(logits, targets).mean().item() == pytest.approx(expected, abs=1e-6)


def test_penalty_equals_a_loop_over_captions_and_locations():
    alphas = torch.rand(N, T, L)
    mask = torch.rand(N, L) > 0.3
    mask[:, 0] = True
    expected = [np.mean([(1 - float(alphas[n, :, i].sum())) ** 2 for i in range(L) if mask[n, i]]) for n in range(N)]
    assert doubly_stochastic_penalty(alphas, mask).item() == pytest.approx(np.mean(expected), abs=1e-6)
    everything = torch.ones(N, L, dtype=torch.bool)
    torch.testing.assert_close(doubly_stochastic_penalty(alphas), doubly_stochastic_penalty(alphas, everything))


def test_penalty_does_not_depend_on_the_batch_size():
    alphas = torch.rand(N, T, L)
    torch.testing.assert_close(doubly_stochastic_penalty(alphas), doubly_stochastic_penalty(alphas.repeat(4, 1, 1)))


def test_steps_spread_evenly_pay_what_the_docstring_says():
    alphas = torch.full((N, T, L), 1 / L)
    assert doubly_stochastic_penalty(alphas).item() == pytest.approx((1 - T / L) ** 2, abs=1e-6)


def test_entropy_is_zero_for_one_location_and_log_l_for_none_preferred():
    assert not step_entropy(torch.nn.functional.one_hot(torch.randint(L, (N, T)), L)).any()
    torch.testing.assert_close(step_entropy(torch.full((N, T, L), 1 / L)), torch.full((N, T), math.log(L)))
