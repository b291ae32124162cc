"""Training with Lightning: the module, the data of a run, callbacks and schedules."""

from captioning.training.callbacks import TerminalReport, Throughput, Unfreeze, ValidationFigures
from captioning.training.datamodule import CaptionDataModule
from captioning.training.module import CaptioningModule
from captioning.training.schedules import WarmupCosine
