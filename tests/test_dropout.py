"""Dropout drops the given fraction, keeps the mean, and follows the seed."""

from __future__ import annotations

import pytest
import torch

from captioning.kernels.dropout import Dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_fraction_and_mean_are_right(p):
    x = torch.ones(400_003)
    y = Dropout(p)(x)
    assert float((y == 0).float().mean()) == pytest.approx(p, abs=0.004)
    assert float(y.mean()) == pytest.approx(1.0, abs=0.02)
    assert len(y.unique()) == 2


def test_units_are_dropped_independently_of_each_other():
    dropped = torch.stack([(Dropout(0.3)(torch.ones(13)) == 0).float() for _ in range(6000)])
    correlation = torch.corrcoef(dropped.T).fill_diagonal_(0.0)
    assert float(correlation.abs().max()) < 0.07  # five standard errors


def test_the_same_seed_drops_the_same_units():
    x, layer = torch.randn(3, 7), Dropout(0.5)
    torch.manual_seed(4)
    first = layer(x)
    second = layer(x)
    torch.manual_seed(4)
    assert torch.equal(layer(x), first) and not torch.equal(first, second)


def test_gradient_passes_through_kept_units_only():
    x = torch.ones(50, requires_grad=True)
    y = Dropout(0.4)(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())


def test_nothing_is_dropped_in_evaluation_or_with_probability_zero():
    x = torch.randn(4)
    assert Dropout(0.0)(x) is x and Dropout(0.5).eval()(x) is x


def test_a_probability_of_one_is_refused():
    with pytest.raises(ValueError, match=r"got 1\.0"):
        Dropout(1.0)
