"""What training minimises: objectives, their terms, and estimators of the gradient of drawn locations."""

from captioning.objective.estimators import (
    ArgmaxBaseline,
    Estimator,
    ExpectedContextBaseline,
    LeaveOneOut,
    MovingAverage,
    NoBaseline,
)
from captioning.objective.objective import Likelihood, Objective
from captioning.objective.reductions import ArcticReduction, Reduction
from captioning.objective.self_critical import SelfCriticalTraining
from captioning.objective.terms import ForcedBatch, Term

__all__ = [
    "ArcticReduction",
    "ArgmaxBaseline",
    "Estimator",
    "ExpectedContextBaseline",
    "ForcedBatch",
    "LeaveOneOut",
    "Likelihood",
    "MovingAverage",
    "NoBaseline",
    "Objective",
    "Reduction",
    "SelfCriticalTraining",
    "Term",
]
