"""Operations on arrays of counts that several metrics share."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def percentage(counts: Floats) -> Floats:
    """Return the hits in percent of the trials, (.., 1), from counts (.., 2) of both; nan without a trial."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return 100 * counts[..., :1] / counts[..., 1:]


def ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Return the quotient, and 0 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(denominator), where=denominator > 0)
