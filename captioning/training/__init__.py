"""Training with Lightning: the module, the data of a run, callbacks and schedules."""

from captioning.training.callbacks import (
    BestCheckpoint,
    CaptionSamples,
    LogLines,
    ResumableStopping,
    StopOnRequest,
    Throughput,
    TrainingBar,
    Unfreeze,
)
from captioning.training.datamodule import CaptionDataModule
from captioning.training.loggers import start_loggers
from captioning.training.module import CaptioningModule
from captioning.training.schedules import WarmupCosine

__all__ = [
    "BestCheckpoint",
    "CaptionDataModule",
    "CaptionSamples",
    "CaptioningModule",
    "LogLines",
    "ResumableStopping",
    "StopOnRequest",
    "Throughput",
    "TrainingBar",
    "Unfreeze",
    "WarmupCosine",
    "start_loggers",
]
