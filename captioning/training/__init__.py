"""Training with Lightning: the module, the data of a run, callbacks and the wandb logger."""

from captioning.training.averaging import WeightAverage
from captioning.training.callbacks import CaptionSamples, Unfreeze
from captioning.training.datamodule import CaptionDataModule
from captioning.training.module import CaptioningModule
from captioning.training.progress import Throughput
from captioning.training.schedules import WarmupCosine
from captioning.training.wandb_run import WandbRun

__all__ = [
    "CaptionDataModule",
    "CaptionSamples",
    "CaptioningModule",
    "Throughput",
    "Unfreeze",
    "WandbRun",
    "WarmupCosine",
    "WeightAverage",
]
