"""Dropout drops the given fraction, each unit by itself, and keeps the mean."""

from __future__ import annotations

import pytest
import torch

from captioning.kernels.dropout import Dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_fraction_and_mean_are_right_and_the_gradient_passes_through_kept_units(p):
    x = torch.ones(400_003, requires_grad=True)
    y = Dropout(p)(x)
    assert float((y == 0).float().mean()) == pytest.approx(p, abs=0.004)
    assert float(y.detach().mean()) == pytest.approx(1.0, abs=0.02)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())


def test_units_are_dropped_independently_of_each_other():
    dropped = torch.stack([(Dropout(0.3)(torch.ones(13)) == 0).float() for _ in range(6000)])
    correlation = torch.corrcoef(dropped.T).fill_diagonal_(0.0)
    assert float(correlation.abs().max()) < 0.07  # five standard errors


def test_nothing_is_dropped_in_evaluation_or_with_probability_zero():
    x = torch.randn(4)
    assert torch.equal(Dropout(0.0)(x), x) and torch.equal(Dropout(0.5).eval()(x), x)
