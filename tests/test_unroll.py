"""Gradients that are computed once after the last step equal those that autograd adds up step by step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from captioning.kernels.unroll import StepLinear, collected, linear, matmul, unrolled, uses_of

T, N, IN, OUT = 4, 3, 5, 7
B, R, L, D = 2, 3, 6, 4


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_collected_weight_of_a_recurrence_gets_the_gradient_of_all_steps():
    weight, start = torch.randn(IN, IN, requires_grad=True), torch.randn(N, IN, requires_grad=True)

    def last(w):
        x = start
        for _ in range(T):
            x = torch.tanh(linear(x, w))
        return x.sum()

    plain = torch.autograd.grad(last(weight), (weight, start))
    torch.testing.assert_close(torch.autograd.grad(last(collected(weight)), (weight, start)), plain)


def test_collected_matrices_get_the_gradient_of_all_steps():
    matrices, x = torch.randn(B, L, D, requires_grad=True), torch.randn(T, B, R, L, requires_grad=True)

    def total(m):
        return sum((matmul(x[t], m) ** 2).sum() for t in range(T))

    plain = torch.autograd.grad(total(matrices), (matrices, x))
    torch.testing.assert_close(torch.autograd.grad(total(collected(matrices)), (matrices, x)), plain)


def test_ordinary_uses_of_a_collected_tensor_count_too():
    weight = torch.randn(OUT, IN, requires_grad=True)
    x = torch.randn(N, IN)
    both = collected(weight)
    (linear(x, both).sum() + (both**2).sum()).backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(OUT, IN) + 2 * weight.detach())


def test_nothing_is_collected_where_no_gradient_is_needed():
    weight = torch.randn(OUT, IN, requires_grad=True)
    with torch.no_grad():
        assert uses_of(collected(weight)) is None
    assert uses_of(collected(weight.detach())) is None


def test_step_linear_is_a_linear_layer_within_and_without_a_recurrence():
    layer = StepLinear(IN, OUT)
    x = torch.randn(T, N, IN)
    outside = torch.stack([layer(step) for step in x])
    (plain,) = torch.autograd.grad((outside**2).sum(), layer.weight)
    with unrolled(nn.Sequential(layer)):
        inside = torch.stack([layer(step) for step in x])
    (collected,) = torch.autograd.grad((inside**2).sum(), layer.weight)
    torch.testing.assert_close(inside, outside)
    torch.testing.assert_close(collected, plain)
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_an_error_within_a_recurrence_leaves_the_layers_as_they_were():
    layer = StepLinear(IN, OUT)
    with pytest.raises(RuntimeError), unrolled(layer):
        layer(torch.randn(N, IN + 1))
    assert layer._collected is None


def test_autocast_applies_within_a_recurrence():
    torch.set_default_dtype(torch.float32)
    layer = StepLinear(IN, OUT)
    x = torch.randn(N, IN)
    with torch.autocast("cpu", torch.bfloat16), unrolled(layer):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(OUT, IN), atol=0.05, rtol=0.02)
    assert layer.weight.grad.dtype == torch.float32
