"""The mixture over locations against its enumeration, its gradients against finite differences and the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from captioning.kernels import marginal
from captioning.kernels.marginal import (
    locate,
    mixture_log_probs,
    mixture_posterior,
    mixture_step,
    plain_mixture_log_probs,
)

B, L, V, R = 3, 5, 11, 4  # R: the rank of G
INDEX = torch.tensor([0, 0, 1, 1, 1, 2])  # one image has more steps than another
M = len(INDEX)


@pytest.fixture(params=[1, 1 << 20], ids=["an image at a time", "all images at once"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(marginal, "_CHUNK_BYTES", {"cpu": request.param})
    monkeypatch.setattr(marginal, "_SUM_ROWS", 2 * L)


def inputs(dtype=torch.float64, scale=1.0, steps=None):
    """Return S, A, W and log_w; scale is the standard deviation of S, and nearly that of G."""
    steps = M if steps is None else steps
    S, A, W = scale * torch.randn(steps, V), scale * torch.randn(B, L, R) / math.sqrt(R), torch.randn(V, R)
    log_w = torch.log_softmax(torch.randn(steps, L + 1), -1)
    return [x.to(dtype) for x in (S, A, W, log_w)]


def masked(log_w):
    """Return weights whose second image lacks a location, and whose last step never looks away."""
    absent = torch.zeros(M, L + 1, dtype=torch.bool)
    absent[INDEX == 1, 3] = True
    absent[-1, 0] = True
    return torch.log_softmax(log_w.masked_fill(absent, -math.inf), -1), absent


def enumerated(S, A, W, log_w):
    """Return p of looking at each location and saying each word (M, L + 1, V), one location after the other."""
    S, A, W, w = (x.detach().double().numpy() for x in (S, A, W, log_w.exp()))
    joint = np.zeros((M, L + 1, V))
    for m in range(M):
        for i in range(L + 1):
            logits = S[m] if i == 0 else S[m] + W @ A[INDEX[m], i - 1]
            exponentials = np.exp(logits - logits.max())
            joint[m, i] = w[m, i] * exponentials / exponentials.sum()
    return torch.from_numpy(joint)


def plain_nll(S, A, W, log_w, index, targets, label_smoothing=0.0):
    return smoothed(plain_mixture_log_probs(S, (A @ W.t())[index], log_w), targets, label_smoothing)


def mixture_nll(S, A, W, log_w, index, targets, label_smoothing=0.0):
    return smoothed(mixture_log_probs(S, A, W, log_w, index), targets, label_smoothing)


def smoothed(log_probs, targets, label_smoothing):
    nll = -log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (1 - label_smoothing) * nll - label_smoothing * log_probs.mean(-1) if label_smoothing else nll


def with_gradients(function, given, *arguments):
    given = [x.detach().clone().requires_grad_() for x in given]
    value = function(*given, *arguments)
    (value.flatten() @ torch.linspace(1, 2, value.numel(), dtype=value.dtype)).backward()
    return [value.detach(), *(x.grad for x in given)]


def test_word_probabilities_are_the_sum_over_locations(chunks):
    S, A, W, log_w = inputs()
    log_w, _ = masked(log_w)
    expected = enumerated(S, A, W, log_w).sum(1)
    torch.testing.assert_close(expected.sum(1), torch.ones(M, dtype=torch.float64))
    torch.testing.assert_close(plain_mixture_log_probs(S, (A @ W.t())[INDEX], log_w), expected.log())
    torch.testing.assert_close(mixture_log_probs(S, A, W, log_w, INDEX), expected.log())


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_nll_is_the_smoothed_cross_entropy_of_the_mixture(label_smoothing, chunks):
    S, A, W, log_w = inputs()
    targets = torch.randint(V, (M,))
    log_p = enumerated(S, A, W, log_w).sum(1).log()
    wanted = torch.full((M, V), label_smoothing / V, dtype=torch.float64)
    wanted[torch.arange(M), targets] += 1 - label_smoothing
    expected = -(wanted * log_p).sum(1)
    for nll in (plain_nll, mixture_nll):
        torch.testing.assert_close(nll(S, A, W, log_w, INDEX, targets, label_smoothing), expected)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_gradients_equal_finite_differences(label_smoothing, chunks):
    given = [x.requires_grad_() for x in inputs()]
    targets = torch.tensor([4, 4, 7, 0, 7, 10])  # twice the same word in an image
    for nll in (plain_nll, mixture_nll):
        assert torch.autograd.gradcheck(lambda *x, nll=nll: nll(*x, INDEX, targets, label_smoothing), given)
    assert torch.autograd.gradcheck(lambda *x: mixture_log_probs(*x, INDEX), given)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_fast_nll_and_gradients_agree_with_the_reference(label_smoothing, dtype, tolerance, chunks):
    S, A, W, log_w = inputs(dtype, scale=2.0)
    log_w, absent = masked(log_w.float())
    targets = torch.randint(V, (M,))
    fast = with_gradients(mixture_nll, [S, A, W, log_w], INDEX, targets, label_smoothing)
    precise = [x.double() for x in (S, A, W, log_w)]
    plain = with_gradients(plain_nll, precise, INDEX, targets, label_smoothing)
    assert fast[0].dtype == torch.float32 and [x.dtype for x in fast[1:]] == [dtype] * 3 + [torch.float32]
    for a, b in zip(fast, plain, strict=True):
        a = a.double().masked_fill(absent, 0) if a.shape == absent.shape else a.double()
        b = b.masked_fill(absent, 0) if b.shape == absent.shape else b  # what the reference has there is 0 times inf
        assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("fast", [mixture_nll, plain_nll])
def test_masked_locations_receive_exactly_no_gradient(fast, chunks):
    S, A, W, log_w = inputs(torch.float32)
    log_w, absent = masked(log_w)
    _, _, for_A, _, for_log_w = with_gradients(fast, [S, A, W, log_w], INDEX, torch.randint(V, (M,)))
    assert not for_A[1, 2].any() and for_A[1, 1].any()  # component 3 is location 2
    assert not for_log_w[absent].any() and for_log_w[~absent].all()


def test_products_are_of_the_type_of_autocast():
    S, A, W, log_w = inputs(torch.float32)
    targets = torch.randint(V, (M,))

    def autocast(*given):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mixture_nll(*given)

    cast = with_gradients(autocast, [S, A, W, log_w], INDEX, targets)
    given = with_gradients(
        lambda S, A, W, *rest: mixture_nll(S, A.bfloat16(), W.bfloat16(), *rest), [S, A, W, log_w], INDEX, targets
    )
    assert all(torch.equal(a, b) for a, b in zip(cast, given, strict=True))
    assert all(x.dtype == torch.float32 for x in cast)


@pytest.mark.parametrize("words", ["targets", "all"])
def test_logits_that_underflow_are_summed_in_logarithms(words, chunks):
    S, A, W, log_w = inputs(torch.float32, scale=40.0)
    S[0] = torch.linspace(-80, 80, V)
    W[:, 0], A[0, :, 0] = torch.linspace(60, -60, V), 2.0  # what the image favours, the sentence excludes
    assert (A @ W.t()).amax() > 80
    log_w, absent = masked(log_w)
    targets = torch.zeros(M, dtype=torch.int64)
    smoothing = 0.0 if words == "targets" else 0.1
    fast = with_gradients(mixture_nll, [S, A, W, log_w], INDEX, targets, smoothing)
    plain = with_gradients(plain_nll, [x.double() for x in (S, A, W, log_w)], INDEX, targets, smoothing)
    for a, b in zip(fast, plain, strict=True):
        b = b.masked_fill(absent, 0) if b.shape == absent.shape else b
        assert torch.isfinite(a).all()
        assert (a.double() - b).norm() <= 1e-4 * b.norm()
    posterior = mixture_posterior(S, A, W, log_w, INDEX, targets)
    joint = enumerated(*(x.double() for x in (S, A, W)), log_w.double())[:, :, 0]
    torch.testing.assert_close(posterior.double(), joint / joint.sum(1, keepdim=True), atol=1e-5, rtol=1e-3)


def test_posterior_is_bayes_rule_and_sums_to_one(chunks):
    S, A, W, log_w = inputs()
    log_w, absent = masked(log_w)
    targets = torch.randint(V, (M,))
    joint = enumerated(S, A, W, log_w)[torch.arange(M), :, targets]
    posterior = mixture_posterior(S, A, W, log_w, INDEX, targets)
    torch.testing.assert_close(posterior, joint / joint.sum(1, keepdim=True))
    torch.testing.assert_close(posterior.sum(1), torch.ones(M, dtype=torch.float64))
    assert not posterior[absent].any()


def test_posterior_is_the_gradient_by_the_log_weights():
    S, A, W, log_w = inputs()
    targets = torch.randint(V, (M,))
    log_w.requires_grad_()
    mixture_nll(S, A, W, log_w, INDEX, targets).sum().backward()
    torch.testing.assert_close(-log_w.grad, mixture_posterior(S, A, W, log_w.detach(), INDEX, targets))


def test_steps_of_a_search_have_the_distribution_of_teacher_forcing(chunks):
    S, A, W, log_w = inputs(steps=2 * B)
    index = torch.arange(B).repeat_interleave(2)
    located = locate(A, W)
    step = mixture_step(S, located, log_w)
    torch.testing.assert_close(step, mixture_log_probs(S, A, W, log_w, index))
    some = torch.tensor([2, 0])
    rows = torch.tensor([4, 5, 0, 1])
    fewer = mixture_step(S[rows], located.select(some), log_w[rows])
    torch.testing.assert_close(fewer, step[rows])


def test_expected_log_probability_is_a_lower_bound():
    S, A, W, log_w = inputs(scale=3.0)
    parts = torch.log_softmax(torch.cat([S.unsqueeze(1), S.unsqueeze(1) + (A @ W.t())[INDEX]], 1), -1)
    bound = (log_w.exp().unsqueeze(-1) * parts).sum(1)  # Eq. 10, Xu et al. 2015, for one step
    log_p = mixture_log_probs(S, A, W, log_w, INDEX)
    assert (bound < log_p).all()
    certain = torch.full_like(log_w, -math.inf)
    certain[:, 2] = 0.0
    torch.testing.assert_close(mixture_log_probs(S, A, W, certain, INDEX), parts[:, 2])


def test_steps_of_an_image_must_be_adjacent():
    S, A, W, log_w = inputs()
    with pytest.raises(ValueError, match="adjacent"):
        mixture_log_probs(S, A, W, log_w, INDEX.flip(0))


def test_largest_tensor_kept_is_that_of_all_locations_and_words():
    S, A, W, log_w = (x.requires_grad_() for x in inputs())
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        mixture_nll(S, A, W, log_w, INDEX, torch.randint(V, (M,)))
    assert max(sizes) == B * L * V
