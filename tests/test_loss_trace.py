"""Losses that were stored once: whoever changes them without meaning to finds out here."""

from __future__ import annotations

import pytest
from loss_trace import KINDS, STEPS, losses, stored

# Another processor, or another number of threads, adds the same numbers in another order: weights that differ by one
# part in ten million, float32's rounding, move these losses by one in ten million, of which the tolerance is twenty
# times. A learning rate that differs by one part in a thousand moves them by more than ten tolerances. The second test
# says so.
TOLERANCE = 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_the_stored_ones(kind):
    """If they changed on purpose: python tests/loss_trace.py"""
    assert losses(kind) == pytest.approx(stored()[kind], rel=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tolerance_lets_rounding_pass_and_nothing_else(kind):
    whole = losses(kind)
    assert len(whole) == STEPS and len(set(whole)) == STEPS
    assert losses(kind, scale=1 + 1e-7) == pytest.approx(whole, rel=TOLERANCE / 5)
    other = losses(kind, lr=0.2 * 1.001)
    assert max(abs(a - b) / b for a, b in zip(other, whole, strict=True)) > 10 * TOLERANCE
