"""The terms of the objective against loops and numbers by hand."""

import math

import numpy as np
import pytest
import torch
from helpers_models import batch_of, captioner_of

from captioning.attention import AdditiveScore, HardAttention, SoftAttention
from captioning.errors import InputError
from captioning.model import AttentionDecoder
from captioning.objective import Likelihood
from captioning.objective.estimators import LeaveOneOut
from captioning.objective.reductions import doubly_stochastic_penalty, step_entropy, step_nll

N, T, L, V, M = 3, 4, 5, 7, 9


def test_nll_is_the_mean_negative_log_probability_of_the_targets():
    logits, targets = torch.randn(M, V), torch.randint(V, (M,))
    expected = -np.mean(
        [math.log(math.exp(x[y]) / sum(map(math.exp, x))) for x, y in zip(logits.tolist(), targets, strict=True)]
    )
    assert step_nll(logits, targets).mean().item() == pytest.approx(expected, abs=1e-6)


def test_penalty_equals_a_loop_over_captions_and_locations():
    alphas = torch.rand(N, T, L)
    exists = torch.rand(N, L) > 0.3
    exists[:, 0] = True
    expected = [np.mean([(1 - float(alphas[n, :, i].sum())) ** 2 for i in range(L) if exists[n, i]]) for n in range(N)]
    assert doubly_stochastic_penalty(alphas, exists).item() == pytest.approx(np.mean(expected), abs=1e-6)
    everything = torch.ones(N, L, dtype=torch.bool)
    torch.testing.assert_close(doubly_stochastic_penalty(alphas), doubly_stochastic_penalty(alphas, everything))


def test_even_alphas_have_the_penalty_in_the_docstring():
    alphas = torch.full((N, T, L), 1 / L)
    assert doubly_stochastic_penalty(alphas).item() == pytest.approx((1 - T / L) ** 2, abs=1e-6)


def test_entropy_is_zero_for_one_location_and_log_l_for_even_alphas():
    assert not step_entropy(torch.nn.functional.one_hot(torch.randint(L, (N, T)), L)).any()
    torch.testing.assert_close(step_entropy(torch.full((N, T, L), 1 / L)), torch.full((N, T), math.log(L)))


def test_the_loss_is_the_nll_plus_lambda_times_the_penalty():
    """With all weights 0, words have probability 1 / V and locations 1 / L; the captions have 3 and 2 steps."""
    decoder = AttentionDecoder(SoftAttention(AdditiveScore(3)), embedding_dim=4, hidden_dim=6, dropout=0.0)
    captioner = captioner_of(decoder, 2, V, std=0.0).train()
    batch = batch_of([[4, 5], [6]], torch.randn(2, L, 2))
    loss, logged, _ = Likelihood(attention_penalty=0.3).bind(decoder)(captioner, batch)
    penalty = ((1 - 3 / L) ** 2 + (1 - 2 / L) ** 2) / 2
    assert loss.item() == logged["loss"].item() == pytest.approx(math.log(V) + 0.3 * penalty, abs=1e-6)
    assert logged["attention_penalty"].item() == pytest.approx(penalty, abs=1e-6)


def test_two_models_may_have_one_objective_whose_estimator_sets_the_samples():
    decoder, objective = AttentionDecoder(HardAttention(AdditiveScore(3))), Likelihood(estimator=LeaveOneOut(3))
    assert objective.bind(decoder).bind(decoder).samples == 3
    with pytest.raises(InputError, match="samples: with hard attention the estimator sets them; leave it out"):
        Likelihood(estimator=LeaveOneOut(3), samples=2).bind(decoder)
