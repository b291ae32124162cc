"""The kernels that go through a mixture's rows of words, against PyTorch's operations in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from captioning.kernels import mixture_rows, native
from captioning.kernels.mixture_rows import SMALLEST, exponentials, log_probs, logits_gradient, ratios

TYPES = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
SHAPES = [(3, 5, 700), (1, 1, 1), (2, 1, 256), (1, 7, 257)]


@pytest.fixture(params=["kernels", "plain"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(mixture_rows, "_usable", lambda *rows: False)
    elif not native.usable(torch.zeros(1)):
        pytest.skip("no C compiler")
    return request.param


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, scale: float = 3.0, seed: int = 1) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("in_place", [False, True])
def test_exponentials(shape, dtype, in_place):
    x = drawn(shape, dtype, scale=9.0)
    largest = x.double().amax(-1, keepdim=True)
    expected = (x.double() - largest).exp()
    out = x if in_place else torch.empty_like(x)
    shift, sums = exponentials(x, out=out)
    assert out.dtype == dtype and shift.dtype == sums.dtype == torch.float32
    # x - largest is rounded first: to 2e-6 of numbers around 30, which is what exp then is off by.
    torch.testing.assert_close(out.double(), expected, rtol=max(TYPES[dtype], 4e-6), atol=1e-30)
    torch.testing.assert_close(shift.double(), largest.squeeze(-1))
    torch.testing.assert_close(sums.double(), expected.sum(-1), rtol=2e-6, atol=0)


def test_exponentials_of_all_sizes_are_as_exact_as_the_kernel_says():
    x = torch.cat([torch.linspace(-87, 0, 1_000_003), torch.arange(-87.0, 1)])
    out = torch.empty(1, len(x))
    exponentials(x.unsqueeze(0), out=out)
    torch.testing.assert_close(out[0].double(), x.double().exp(), rtol=5e-7, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_log_probs(shape, dtype):
    s, mixed = drawn(shape, dtype), drawn(shape, dtype, seed=2).abs()
    shift, nowhere = drawn(shape[:-1], seed=3), drawn(shape[:-1], seed=4).abs() / 100
    out = torch.empty(shape)
    least = log_probs(s, shift, mixed, nowhere, out=out)
    total = mixed.double() + nowhere.double().unsqueeze(-1)
    expected = s.double() - shift.double().unsqueeze(-1) + total.log()
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(least.double(), total.amin(-1), rtol=1e-6, atol=0)


def test_logarithms_of_all_sizes():
    mixed = torch.cat([torch.logspace(-15, 12, 5001), torch.linspace(0.5, 2.0, 1001), torch.tensor([1.0])])
    out = torch.empty(1, len(mixed))
    log_probs(torch.zeros_like(out), torch.zeros(1), mixed.unsqueeze(0), torch.zeros(1), out=out)
    torch.testing.assert_close(out[0].double(), mixed.double().log(), rtol=2e-7, atol=1e-7)


def test_totals_that_vanished_are_finite_and_reported():
    mixed = torch.tensor([[0.0, 1e-30, 2.0]])
    out = torch.empty(1, 3)
    least = log_probs(torch.zeros(1, 3), torch.zeros(1), mixed, torch.zeros(1), out=out)
    assert least.item() == 0.0
    torch.testing.assert_close(out[0, :2].exp(), torch.full((2,), SMALLEST))
    quotients, _ = ratios(torch.ones(1, 3), mixed, torch.zeros(1))
    torch.testing.assert_close(quotients, torch.tensor([[1 / SMALLEST, 1 / SMALLEST, 0.5]]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_ratios_and_gradient(shape, dtype):
    q, mixed, e = drawn(shape), drawn(shape, dtype, seed=2).abs() + 0.1, drawn(shape, dtype, seed=3).abs()
    nowhere = drawn(shape[:-1], seed=4)
    U, sums = ratios(q, mixed, nowhere.abs())
    expected = q.double() / (mixed.double() + nowhere.abs().double().unsqueeze(-1))
    assert U.dtype == dtype
    torch.testing.assert_close(U.double(), expected, rtol=TYPES[dtype], atol=1e-6)
    torch.testing.assert_close(sums.double(), expected.sum(-1), rtol=1e-4, atol=1e-4)
    out = torch.empty_like(mixed)
    logits_gradient(q, mixed, nowhere, e, out=out)
    expected = q.double() + (mixed.double() - nowhere.double().unsqueeze(-1)) * e.double()
    # In bfloat16 PyTorch rounds in between.
    torch.testing.assert_close(out.double(), expected, rtol=3 * TYPES[dtype], atol=30 * TYPES[dtype])


def test_nan_stays_nan():
    """So that a run that diverges stops."""
    s, mixed = torch.zeros(2, 300), torch.ones(2, 300)
    s[0, 7] = float("nan")
    out = torch.empty(2, 300)
    log_probs(s, torch.zeros(2), mixed, torch.zeros(2), out=out)
    assert out[0, 7].isnan() and out[1].isfinite().all()
    mixed[1, 5] = float("nan")
    log_probs(torch.zeros(2, 300), torch.zeros(2), mixed, torch.zeros(2), out=out)
    assert out[1, 5].isnan() and out[0].isfinite().all()
    gradient = torch.empty(2, 300)
    logits_gradient(s, mixed, torch.zeros(2), mixed, out=gradient)
    assert gradient[0, 7].isnan()
