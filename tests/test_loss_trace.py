"""Losses are those that were stored once, so that no change alters them by accident."""

import pytest
from loss_trace import KINDS, STEPS, losses, stored

# Other processors and numbers of threads add the same numbers in another order. Weights that differ by float32's
# rounding, 1e-7, change these losses by 1e-7, a twentieth of the tolerance. A learning rate that differs by 1e-3
# changes them by more than ten tolerances. The second test checks both.
TOLERANCE = 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_the_stored_ones(kind):
    """If they changed on purpose: python tests/loss_trace.py"""
    assert losses(kind) == pytest.approx(stored()[kind], rel=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tolerance_lets_rounding_pass_and_nothing_else(kind):
    exact = losses(kind)
    assert len(exact) == STEPS and len(set(exact)) == STEPS
    assert losses(kind, scale=1 + 1e-7) == pytest.approx(exact, rel=TOLERANCE / 5)
    changed = losses(kind, lr=0.2 * 1.001)
    assert max(abs(a - b) / b for a, b in zip(changed, exact, strict=True)) > 10 * TOLERANCE
