"""The product of few rows in C against PyTorch's, and when it is used."""

from __future__ import annotations

import pytest
import torch

from captioning.kernels import linear as module
from captioning.kernels import native
from captioning.kernels.linear import FEW, Linear, linear
from captioning.kernels.unroll import StepLinear

OUT = 37

pytestmark = pytest.mark.skipif(not native.usable(torch.zeros(1)), reason="needs a C compiler")


@pytest.fixture
def called(monkeypatch) -> list[str]:
    """The kernels that are called."""
    names: list[str] = []

    def call(function: str, *arguments) -> None:
        names.append(function)
        native_call(function, *arguments)

    native_call = native.call
    monkeypatch.setattr(module.native, "call", call)
    return names


@torch.inference_mode()
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1, 15, 16, 70])
def test_few_rows_equal_the_product_in_float64(size, bias, threads, called, monkeypatch):
    monkeypatch.setattr(native, "threads", lambda: threads)
    for rows in range(1, FEW + 1):
        layer, x = Linear(size, OUT, bias=bias), torch.randn(rows, size)
        expected = x.double() @ layer.weight.double().t() + (layer.bias.double() if bias else 0)
        torch.testing.assert_close(layer(x).double(), expected, atol=3e-6, rtol=1e-5)
    assert called == ["linear_forward"] * FEW


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_rows_beside_it(called):
    layer, x = Linear(70, OUT), torch.randn(FEW, 70)
    together = layer(x)
    assert all(torch.equal(layer(x[n : n + 1])[0], together[n]) for n in range(FEW))


@torch.inference_mode()
def test_leading_axes_stay_and_strides_do_not_matter(called):
    layer, x = StepLinear(20, OUT), torch.randn(20, 3, 2).permute(2, 1, 0)
    y = layer(x)
    assert y.shape == (2, 3, OUT) and called == ["linear_forward"]
    torch.testing.assert_close(y, torch.nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.randn(FEW + 1, 6), torch.randn(OUT, 6)),
        (torch.randn(0, 6), torch.randn(OUT, 6)),
        (torch.randn(2, 6, dtype=torch.float64), torch.randn(OUT, 6, dtype=torch.float64)),
        (torch.randn(2, 6, dtype=torch.bfloat16), torch.randn(OUT, 6, dtype=torch.bfloat16)),
        (torch.randn(2, 6), torch.randn(6, OUT).t()),
    ],
    ids=["many rows", "no rows", "float64", "bfloat16", "strided weights"],
)
def test_other_products_are_pytorchs(x, weight, called):
    with torch.inference_mode():
        torch.testing.assert_close(linear(x, weight, None), torch.nn.functional.linear(x, weight))
    assert not called


def test_gradients_and_autocast_are_pytorchs(called):
    layer, x = Linear(6, OUT), torch.randn(2, 6)
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(OUT, 6))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert not called
    with torch.no_grad():
        layer(x)
    assert called


def test_an_input_of_another_width_is_refused_as_by_pytorch():
    with torch.no_grad(), pytest.raises(RuntimeError):
        linear(torch.ones(1, 8), torch.ones(3, 4), None)
