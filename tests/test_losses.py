"""The terms of the objective against loops and numbers by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from captioning.attention import AdditiveScore, SoftAttention
from captioning.data.batch import CaptionBatch, pad_captions
from captioning.encoders import ConvEncoder
from captioning.model import AttentionDecoder
from captioning.model.captioner import Captioner
from captioning.objective import Likelihood
from captioning.objective.reductions import caption_nll, doubly_stochastic_penalty, step_entropy, token_log_probs
from captioning.objective.terms import ForcedBatch, Term

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


def test_steps_spread_evenly_cost_the_docstrings_penalty():
    alphas = torch.full((N, T, L), 1 / L)
    assert doubly_stochastic_penalty(alphas).item() == pytest.approx((1 - T / L) ** 2, abs=1e-6)


def test_entropy_is_zero_for_one_location_and_log_l_for_none_preferred():
    assert not step_entropy(torch.nn.functional.one_hot(torch.randint(L, (N, T)), L)).any()
    torch.testing.assert_close(step_entropy(torch.full((N, T, L), 1 / L)), torch.full((N, T), math.log(L)))


class LongestCaption(Term):
    """Half the number of steps of the longest caption."""

    def __init__(self, *, reported: bool) -> None:
        super().__init__()
        self.reported = reported

    def forward(self, step: ForcedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        longest = step.output.mask.sum(dim=1).max().float()
        return 0.5 * longest, {"longest": longest}


@pytest.mark.parametrize("reported", [True, False])
def test_a_term_of_the_users_own_is_added_to_the_loss_and_if_it_counts_to_the_logged_loss(reported):
    """With all weights 0, words have probability 1 / V and locations 1 / L; the captions have 3 and 2 steps."""
    decoder = AttentionDecoder(SoftAttention(AdditiveScore(3)), embedding_dim=4, hidden_dim=6, dropout=0.0)
    captioner = Captioner(ConvEncoder((2,), (4,), image_size=16), decoder, vocabulary_size=V).train()
    for parameter in decoder.parameters():
        torch.nn.init.zeros_(parameter)
    images = torch.arange(2)
    batch = CaptionBatch(*pad_captions([[4, 5], [6]]), images, images, images, annotations=torch.randn(2, L, 2))
    objective = Likelihood(attention_penalty=0.3, terms=[LongestCaption(reported=reported)]).connect(decoder.attention)
    loss, logged, _ = objective(captioner, batch)
    likelihood = math.log(V) + 0.3 * ((1 - 3 / L) ** 2 + (1 - 2 / L) ** 2) / 2
    assert loss.item() == pytest.approx(likelihood + 1.5, abs=1e-6)
    assert logged["loss"].item() == pytest.approx(likelihood + 1.5 * reported, abs=1e-6)
    assert logged["longest"].item() == 3
