"""What training minimises, and how its gradient reaches drawn locations. PyTorch alone."""

from captioning.objective.estimators import (
    Estimator,
    ExpectedContext,
    LeaveOneOut,
    MovingAverage,
    NoBaseline,
    RewardToGo,
    SelfCritical,
)
from captioning.objective.objective import Objective
from captioning.objective.self_critical import SelfCriticalTraining
from captioning.objective.terms import ArcticReduction, Reduction

__all__ = [
    "ArcticReduction",
    "Estimator",
    "ExpectedContext",
    "LeaveOneOut",
    "MovingAverage",
    "NoBaseline",
    "Objective",
    "Reduction",
    "RewardToGo",
    "SelfCritical",
    "SelfCriticalTraining",
]
