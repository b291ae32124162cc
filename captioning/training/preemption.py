"""Stopping when a scheduler asks: between two batches, all processes at the same one, with the state saved."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import ParallelStrategy
from pytorch_lightning.utilities import rank_zero_only

STOPPED = 128 + signal.SIGTERM
"""Exit code of a run that was asked to stop and can be resumed."""


class Preemption(Callback):
    """On SIGTERM, and on SIGUSR1 under SLURM, ends training after the batch in progress, or with accumulated gradients
    after the step that they are for: a checkpoint has none.

    The trainer then saves as after any exception (``last.save_on_exception``), and the run resumes at the next batch.
    It is enough that one process is asked: all of them compare notes after every batch. Lightning's own handlers do
    their work in the middle of whatever the process was doing: the one of SIGTERM talks to the other processes, which
    may be waiting for something else, and the one of SIGUSR1 saves half a step.
    """

    def __init__(self) -> None:
        self._asked = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # signals are the main thread's
        # In place of the trainer's own, which it registers just before and removes at its end.
        signals = [signal.SIGTERM, *([signal.SIGUSR1] if "SLURM_JOB_ID" in os.environ else [])]
        for number in signals:
            signal.signal(number, self._note)

    def _note(self, *_: Any) -> None:
        self._asked = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        asked = self._asked
        if trainer.world_size > 1 and isinstance(trainer.strategy, ParallelStrategy):
            anyone = torch.tensor(float(asked), device=pl_module.device)
            asked = bool(trainer.strategy.reduce(anyone, reduce_op="sum"))
        if asked and not trainer.fit_loop.epoch_loop._should_accumulate():
            trainer._signal_connector.received_sigterm = True  # what the trainer looks at when a batch is done


def process_rank() -> int:
    """Return which process this is, before there is a trainer that knows it."""
    return getattr(rank_zero_only, "rank", 0)
