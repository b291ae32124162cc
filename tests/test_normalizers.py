"""Normalizers against hand-computed cases, bisection and the entmax package; masks, ties and exact zeros."""

import math

import numpy as np
import pytest
import torch

from captioning.attention import (
    AdditiveScore,
    Entmax15,
    HardAttention,
    LocalScore,
    Normalizer,
    NTMScore,
    SoftAttention,
    Softmax,
    Sparsemax,
)
from captioning.errors import InputError
from captioning.objective.reductions import step_entropy

B, R, L = 3, 4, 9
EXPONENTS = {Softmax: 1.0, Entmax15: 1.5, Sparsemax: 2.0}

every = pytest.mark.parametrize("kind", EXPONENTS, ids=lambda kind: kind.__name__)
every_sparse = pytest.mark.parametrize("kind", [Entmax15, Sparsemax], ids=lambda kind: kind.__name__)


def alphas_of(kind: type[Normalizer], logits, mask=None) -> torch.Tensor:
    return kind()(torch.as_tensor(logits), mask)[0]


def bisected(logits: np.ndarray, a: float) -> np.ndarray:
    """a-entmax of logits (L,): the tau at which max((a - 1) e_i - tau, 0)^(1 / (a - 1)) sums to 1, by bisection."""
    x = (a - 1) * logits
    low, high = x.max() - 1, x.max()
    for _ in range(200):
        tau = (low + high) / 2
        total = (np.maximum(x - tau, 0) ** (1 / (a - 1))).sum()
        low, high = (tau, high) if total > 1 else (low, tau)
    return np.maximum(x - low, 0) ** (1 / (a - 1))


@pytest.mark.parametrize(
    ("kind", "logits", "expected"),
    [
        (Sparsemax, [0.5, 0.0], [0.75, 0.25]),
        (Sparsemax, [1.0, 0.8, 0.1], [0.6, 0.4, 0.0]),
        (Sparsemax, [2.0, 0.0, 0.0], [1.0, 0.0, 0.0]),
        (Sparsemax, [0.1, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]),
        (Entmax15, [1.0, 0.0], [(0.25 + math.sqrt(7) / 4) ** 2, (0.25 - math.sqrt(7) / 4) ** 2]),
        (Entmax15, [2.0, 0.0, -1.0], [1.0, 0.0, 0.0]),  # at the edge: x = 1, 0 and tau = 0
        (Softmax, [math.log(3.0), 0.0], [0.75, 0.25]),
    ],
)
def test_alphas_are_those_computed_by_hand(kind, logits, expected):
    torch.testing.assert_close(alphas_of(kind, logits), torch.tensor(expected))


@every_sparse
@pytest.mark.parametrize("scale", [0.01, 0.3, 1.0, 5.0, 100.0])
def test_sparse_alphas_equal_those_by_bisection(kind, scale):
    logits = scale * torch.randn(20, L, dtype=torch.double)
    expected = np.array([bisected(row, EXPONENTS[kind]) for row in logits.numpy()])
    np.testing.assert_allclose(alphas_of(kind, logits).numpy(), expected, atol=1e-12)


@every
def test_gradients_of_alphas_and_their_logarithms_match_finite_differences(kind):
    mask = torch.ones(B, 1, L, dtype=torch.bool)
    mask[0, 0, 2:5] = False
    logits = torch.randn(B, R, L, dtype=torch.double, requires_grad=True)
    torch.autograd.gradcheck(lambda e: kind()(e, mask)[0], logits)
    support = alphas_of(kind, logits, mask) > 0
    torch.autograd.gradcheck(lambda e: kind()(e, mask)[1][support], logits)


@every
def test_alphas_sum_to_one_and_equal_the_exponential_of_their_logarithms(kind):
    alphas, log_alphas = kind()(3 * torch.randn(B, R, L), None)
    torch.testing.assert_close(alphas.sum(-1), torch.ones(B, R))
    torch.testing.assert_close(log_alphas.exp(), alphas)
    assert (log_alphas[alphas == 0] == -math.inf).all()
    assert kind().sparse == bool((alphas == 0).any())


@every
def test_masked_locations_get_zero_and_change_nothing(kind):
    logits, mask = 0.3 * torch.randn(B, R, L), torch.rand(B, 1, L) > 0.4
    mask[..., 3] = True
    alphas, log_alphas = kind()(logits.masked_fill(~mask, 50.0), mask)
    masked = ~mask.expand(B, R, L)
    assert (alphas[masked] == 0).all() and (log_alphas[masked] == -math.inf).all()
    for b in range(B):
        torch.testing.assert_close(alphas[b][:, mask[b, 0]], alphas_of(kind, logits[b][:, mask[b, 0]]))


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_16_bits_are_normalized_in_float32(kind, dtype):
    largest = torch.finfo(torch.float16).max
    logits = torch.tensor([[largest, -largest, 0.0], [largest, largest, -largest], [0.01, 0.0, -0.01]], dtype=dtype)
    alphas = alphas_of(kind, logits)
    assert alphas.dtype == torch.float32
    torch.testing.assert_close(alphas[:2], torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]))
    torch.testing.assert_close(alphas[2], alphas_of(kind, logits[2].float()))
    torch.testing.assert_close(alphas.sum(-1), torch.ones(3))


# In attention


def attention_of(selection, kind: type[Normalizer], **options):
    attention = selection(AdditiveScore(6), normalizer=kind(), **options)
    attention.build(5, 7, (3, 3))
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    return attention.train()


@every_sparse
@pytest.mark.parametrize("sample_probability", [0.5, 1.0])
def test_no_draw_and_no_gradient_reaches_a_location_outside_the_support(kind, sample_probability):
    """Neither the drawn nor the expected context, nor REINFORCE or the entropy, moves a logit whose alpha is 0."""
    attention = attention_of(HardAttention, kind, sample_probability=sample_probability)
    memory = attention.prepare(torch.randn(B, L, 5))
    query = torch.randn(B * R, 7)
    logits = attention.score(query.unflatten(0, (B, R)), memory.projected).detach().requires_grad_()
    attention.score.forward = lambda *_: logits
    for _ in range(50):
        out = attention(query, memory)[0]
        outside = (out.alphas == 0).view(B, R, L)
        assert outside.any() and out.location_log_prob.isfinite().all()
        entropy = step_entropy(out.alphas)
        (gradient,) = torch.autograd.grad((out.context.sum() + out.location_log_prob.sum() + entropy.sum()), logits)
        assert gradient.isfinite().all() and gradient.any() and not gradient[outside].any()


@pytest.mark.parametrize("score", [NTMScore(6), LocalScore(AdditiveScore(6))], ids=lambda score: type(score).__name__)
@pytest.mark.parametrize("selection", [SoftAttention, HardAttention])
def test_scores_that_give_logarithms_of_weights_refuse_sparse_alphas_in_one_line(score, selection):
    with pytest.raises(InputError, match=f"normalizer: {type(score).__name__} .* leave out Sparsemax") as refused:
        selection(score, normalizer=Sparsemax()).build(5, 7, (3, 3))
    assert "\n" not in str(refused.value)
    selection(score, normalizer=Softmax()).build(5, 7, (3, 3))
