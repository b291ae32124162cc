"""What training minimizes: objectives, and estimators of the gradient of draws."""

from captioning.objective.estimators import ArcticMovingAverage, Estimator, LeaveOneOut, MovingAverage
from captioning.objective.guidance import EvidenceGuidance, Guidance, RegionGuidance
from captioning.objective.objective import Likelihood, Objective
from captioning.objective.reductions import ArcticReduction, Reduction
from captioning.objective.self_critical import SelfCriticalTraining
