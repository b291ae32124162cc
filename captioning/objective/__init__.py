"""What training minimises: objectives, and estimators of the gradient of drawn locations."""

from captioning.objective.estimators import (
    ArgmaxBaseline,
    Estimator,
    ExpectedContextBaseline,
    LeaveOneOut,
    MovingAverage,
)
from captioning.objective.objective import Likelihood, Objective
from captioning.objective.reductions import ArcticReduction, Reduction
from captioning.objective.self_critical import SelfCriticalTraining

__all__ = [
    "ArcticReduction",
    "ArgmaxBaseline",
    "Estimator",
    "ExpectedContextBaseline",
    "LeaveOneOut",
    "Likelihood",
    "MovingAverage",
    "Objective",
    "Reduction",
    "SelfCriticalTraining",
]
