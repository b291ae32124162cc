"""The likelihood summed over locations: its enumeration, and its gradients by finite differences and the formula."""

import math

import numpy as np
import pytest
import torch

from captioning.kernels import summed
from captioning.kernels.summed import (
    location_exponentials,
    plain_summed_log_probs,
    summed_log_probs,
    summed_posterior,
    summed_step,
)

B, L, V, R = 3, 5, 11, 4  # R: the rank of G
INDEX = torch.tensor([0, 0, 1, 1, 1, 2])  # one image has more steps than another
M = len(INDEX)


@pytest.fixture(params=[1, 1 << 20], ids=["an image at a time", "all images at once"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(summed, "CPU_CHUNK_BYTES", request.param)


def inputs(dtype=torch.float64, scale=1.0, steps=None):
    """Return Q, C, W and log_w; scale is the standard deviation of Q, and nearly that of G."""
    steps = M if steps is None else steps
    Q, C, W = scale * torch.randn(steps, V), scale * torch.randn(B, L, R) / math.sqrt(R), torch.randn(V, R)
    log_w = torch.log_softmax(torch.randn(steps, L + 1), -1)
    return [x.to(dtype) for x in (Q, C, W, log_w)]


def masked(log_w):
    """Return weights whose second image lacks a location, and whose last step never looks away."""
    absent = torch.zeros(M, L + 1, dtype=torch.bool)
    absent[INDEX == 1, 3] = True
    absent[-1, 0] = True
    return torch.log_softmax(log_w.masked_fill(absent, -math.inf), -1), absent


def enumerated(Q, C, W, log_w):
    """Return p of looking at each location and saying each word (M, L + 1, V), one location after the other."""
    Q, C, W, w = (x.detach().double().numpy() for x in (Q, C, W, log_w.exp()))
    joint = np.zeros((M, L + 1, V))
    for m in range(M):
        for i in range(L + 1):
            logits = Q[m] if i == 0 else Q[m] + W @ C[INDEX[m], i - 1]
            exponentials = np.exp(logits - logits.max())
            joint[m, i] = w[m, i] * exponentials / exponentials.sum()
    return torch.from_numpy(joint)


def plain(Q, C, W, log_w):
    return plain_summed_log_probs(Q, (C @ W.t())[INDEX], log_w)


def fast(Q, C, W, log_w):
    return summed_log_probs(Q, C, W, log_w, INDEX)


def with_gradients(function, tensors):
    """Return the log-probabilities, and the gradients of a sum of them with a weight for every word."""
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    value = function(*tensors)
    (value.flatten() @ torch.linspace(1, 2, value.numel(), dtype=value.dtype)).backward()
    return [value.detach(), *(x.grad for x in tensors)]


def test_the_sum_with_sparse_weights_is_exact(chunks):
    """Values, gradients and posterior where at most 3 of 5 locations have a weight at any step of an image."""
    Q, C, W, log_w = inputs()
    absent = torch.zeros(M, L + 1, dtype=torch.bool)
    absent[INDEX == 0, 3:] = absent[INDEX == 1, :3] = absent[INDEX == 2, 2:] = True
    absent[0, 1] = True  # one step only: the image's other step looks there
    log_w = torch.log_softmax(log_w.masked_fill(absent, -math.inf), -1)
    for ours, reference in zip(*(with_gradients(f, [Q, C, W, log_w]) for f in (fast, plain)), strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-10, rtol=1e-10)
    targets = torch.randint(V, (M,))
    joint = enumerated(Q, C, W, log_w)[torch.arange(M), :, targets]
    posterior = summed_posterior(Q, C, W, log_w, INDEX, targets)
    torch.testing.assert_close(posterior, joint / joint.sum(1, keepdim=True))


def test_word_probabilities_are_the_sum_over_locations_and_the_posterior_is_bayes_rule(chunks):
    Q, C, W, log_w = inputs()
    log_w, absent = masked(log_w)
    joint, targets = enumerated(Q, C, W, log_w), torch.randint(V, (M,))
    for log_probs in (plain, fast):
        torch.testing.assert_close(log_probs(Q, C, W, log_w), joint.sum(1).log())
    posterior = summed_posterior(Q, C, W, log_w, INDEX, targets)
    of_targets = joint[torch.arange(M), :, targets]
    torch.testing.assert_close(posterior, of_targets / of_targets.sum(1, keepdim=True))
    assert not posterior[absent].any()


def test_gradients_equal_finite_differences(chunks):
    for log_probs in (plain, fast):
        assert torch.autograd.gradcheck(log_probs, [x.requires_grad_() for x in inputs()])


def assert_near(tensors, expected, absent, tolerance):
    for a, b in zip(tensors, expected, strict=True):
        b = b.masked_fill(absent, 0) if b.shape == absent.shape else b  # the reference has 0 times infinity there
        assert torch.isfinite(a).all()
        assert (a.double() - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_fast_log_probs_and_gradients_agree_with_the_reference(dtype, tolerance, chunks):
    Q, C, W, log_w = inputs(dtype, scale=2.0)
    log_w, absent = masked(log_w.float())
    result = with_gradients(fast, [Q, C, W, log_w])
    assert [x.dtype for x in result] == [torch.float32] + [dtype] * 3 + [torch.float32]
    assert_near(result, with_gradients(plain, [x.double() for x in (Q, C, W, log_w)]), absent, tolerance)


@pytest.mark.parametrize("log_probs", [fast, plain])
def test_masked_locations_receive_exactly_no_gradient(log_probs, chunks):
    Q, C, W, log_w = inputs(torch.float32)
    log_w, absent = masked(log_w)
    _, _, dC, _, dlog_w = with_gradients(log_probs, [Q, C, W, log_w])
    assert not dC[1, 2].any() and dC[1, 1].any()  # component 3 is location 2
    assert not dlog_w[absent].any() and dlog_w[~absent].all()


def test_products_have_the_type_of_autocast():
    tensors = inputs(torch.float32)

    def autocast(*tensors):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fast(*tensors)

    cast = with_gradients(autocast, tensors)
    explicit = with_gradients(lambda Q, C, W, log_w: fast(Q, C.bfloat16(), W.bfloat16(), log_w), tensors)
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(cast, explicit, strict=True))


def test_logits_that_underflow_are_summed_in_logarithms(chunks):
    Q, C, W, log_w = inputs(torch.float32, scale=40.0)
    Q[0] = torch.linspace(-80, 80, V)
    W[:, 0], C[0, :, 0] = torch.linspace(60, -60, V), 2.0  # the image favours words that the sentence excludes
    assert (C @ W.t()).amax() > 80
    log_w, absent = masked(log_w)
    precise = [x.double() for x in (Q, C, W, log_w)]
    assert_near(with_gradients(fast, [Q, C, W, log_w]), with_gradients(plain, precise), absent, 1e-4)
    posterior = summed_posterior(Q, C, W, log_w, INDEX, torch.zeros(M, dtype=torch.int64))
    joint = enumerated(*precise)[:, :, 0]
    torch.testing.assert_close(posterior.double(), joint / joint.sum(1, keepdim=True), atol=1e-5, rtol=1e-3)


def test_steps_of_a_search_have_the_distribution_of_teacher_forcing(chunks):
    Q, C, W, log_w = inputs(steps=2 * B)
    exp_G = location_exponentials(C, W)
    step = summed_step(Q, C, W, log_w, exp_G)
    torch.testing.assert_close(step, summed_log_probs(Q, C, W, log_w, torch.arange(B).repeat_interleave(2)))
    rows, images = torch.tensor([4, 5, 0, 1]), torch.tensor([2, 0])
    torch.testing.assert_close(summed_step(Q[rows], C[images], W, log_w[rows], exp_G[images]), step[rows])


def test_largest_tensor_kept_is_that_of_all_locations_and_words():
    Q, C, W, log_w = (x.requires_grad_() for x in inputs())
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        fast(Q, C, W, log_w)
    assert max(sizes) == B * L * V
