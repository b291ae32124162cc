"""Gradients that are computed once after the last step equal those that autograd adds up step by step."""

import pytest
import torch
from torch import nn

from captioning.kernels.deferred import defer_gradient, deferred_uses
from captioning.kernels.products import image_product
from captioning.kernels.recurrence import deferring_weight_gradients
from captioning.linear import Linear, linear

T, N, IN, OUT = 4, 3, 5, 7
B, R, L = 2, 3, 6


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("product", "start", "factor"),
    [(linear, (N, IN), (IN, IN)), (image_product, (B, R, L), (B, L, L))],
    ids=["linear", "image_product"],
)
def test_a_deferred_tensor_gets_the_gradient_of_all_steps(product, start, factor):
    inputs = torch.randn(start, requires_grad=True), torch.randn(factor, requires_grad=True)

    def last(x, factor):
        for _ in range(T):
            x = torch.tanh(product(x, factor))
        return x.sum()

    plain = torch.autograd.grad(last(*inputs), inputs)
    torch.testing.assert_close(torch.autograd.grad(last(inputs[0], defer_gradient(inputs[1])), inputs), plain)


def test_ordinary_uses_of_a_deferred_tensor_count_too():
    weight, x = torch.randn(OUT, IN, requires_grad=True), torch.randn(N, IN)
    both = defer_gradient(weight)
    (linear(x, both).sum() + (both**2).sum()).backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(OUT, IN) + 2 * weight.detach())


def test_nothing_is_deferred_where_no_gradient_is_needed():
    weight = torch.randn(OUT, IN, requires_grad=True)
    with torch.no_grad():
        assert deferred_uses(defer_gradient(weight)) is None
    assert deferred_uses(defer_gradient(weight.detach())) is None


def test_a_layer_is_a_linear_layer_within_and_without_a_recurrence():
    layer, x = Linear(IN, OUT), torch.randn(T, N, IN)
    outside = torch.stack([layer(step) for step in x])
    (plain,) = torch.autograd.grad((outside**2).sum(), layer.weight)
    with deferring_weight_gradients(nn.Sequential(layer)):
        inside = torch.stack([layer(step) for step in x])
    (deferred,) = torch.autograd.grad((inside**2).sum(), layer.weight)
    torch.testing.assert_close(inside, outside)
    torch.testing.assert_close(deferred, plain)
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_an_error_within_a_recurrence_leaves_the_layers_as_they_were():
    layer = Linear(IN, OUT)
    with pytest.raises(RuntimeError), deferring_weight_gradients(layer):
        layer(torch.randn(N, IN + 1))
    layer(torch.randn(N, IN)).sum().backward()
    assert layer.weight.grad is not None


def test_autocast_applies_within_a_recurrence():
    torch.set_default_dtype(torch.float32)
    layer, x = Linear(IN, OUT), torch.randn(N, IN)
    with torch.autocast("cpu", torch.bfloat16), deferring_weight_gradients(layer):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(OUT, IN), atol=0.05, rtol=0.02)
    assert layer.weight.grad.dtype == torch.float32
