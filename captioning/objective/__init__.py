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
from captioning.objective.losses import ArcticReduction, Reduction
from captioning.objective.objective import Objective
from captioning.objective.scheduled_sampling import ScheduledSampling
from captioning.objective.self_critical import SelfCriticalTraining

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
    "ScheduledSampling",
    "SelfCritical",
    "SelfCriticalTraining",
]
