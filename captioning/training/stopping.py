"""Stopping on request of a scheduler or by Ctrl-C: between two steps, with the state saved, to be resumed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import ParallelStrategy
from pytorch_lightning.utilities.exceptions import SIGTERMException

from captioning.training.processes import process_rank

STOPPED = 128 + signal.SIGTERM
"""Exit code of a run that was asked to stop and can be resumed."""


class Preemption(Callback):
    """Ends training after the current step on SIGTERM, on SIGHUP (its terminal closed), and under SLURM on SIGUSR1.

    The trainer then saves, as after any exception (``last.save_on_exception``), and the run resumes at the next batch.
    A checkpoint holds no gradients, so accumulated ones are applied first. All processes stop at the same batch, even
    if only one got the signal: they compare after every batch.

    Lightning's own handlers act immediately, whatever the process is doing: the one of SIGTERM communicates with the
    other processes, which may be waiting for something else, and the one of SIGUSR1 saves half a step.
    """

    def __init__(self) -> None:
        self._asked = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        # These replace the trainer's own, which it registers just before and removes at its end.
        names = ["SIGTERM", "SIGHUP", *(["SIGUSR1"] if "SLURM_JOB_ID" in os.environ else [])]
        for number in (getattr(signal, name) for name in names if hasattr(signal, name)):  # Windows lacks some
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
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
            trainer._signal_connector.received_sigterm = True  # the trainer looks at this after every batch


@contextmanager
def ends_after_the_step() -> Iterator[None]:
    """Turn the first Ctrl-C into SIGTERM: all processes finish their step, save and stop.

    A second Ctrl-C ends the process immediately, without saving, because half a step is not worth saving. Before the
    trainer is at work, the first Ctrl-C interrupts.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the run.
        SystemExit: The run was asked to stop. The code is ``STOPPED``, and 0 for processes that the first one started:
            any other code would make the launcher kill the first one while it saves.
    """
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        elif signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, signal.SIG_IGN, None):
            raise KeyboardInterrupt
        else:
            asked = True
            print("\nending after this step; Ctrl-C again ends at once, without saving", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    except SIGTERMException:
        if process_rank():
            raise SystemExit(0) from None
        if asked:
            raise KeyboardInterrupt from None
        print("stopped on request; the run resumes at the next batch", file=sys.stderr)
        raise SystemExit(STOPPED) from None
    except SystemExit as ended:
        if isinstance(ended.__context__, KeyboardInterrupt):  # Lightning ends with exit code 1
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)
