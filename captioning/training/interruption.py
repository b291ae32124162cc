"""Ctrl-C ends a run after the step that it is in, so that the run can go on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from pytorch_lightning.utilities.exceptions import SIGTERMException

from captioning.training.preemption import STOPPED, process_rank


@contextmanager
def ends_after_the_step() -> Iterator[None]:
    """Turn the first Ctrl-C into Lightning's SIGTERM: it finishes the step on all processes, saves and stops.

    A second Ctrl-C ends the process at once, without saving: in the middle of a step there is nothing worth saving.
    Before the trainer is at work, the first one interrupts.

    Raises:
        KeyboardInterrupt: the run was ended by Ctrl-C.
        SystemExit: with ``STOPPED``, it was asked to stop; with 0 of a process that the first one has started, which
            any other code would have killed while it ends.
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
        print(
            "stopped on request; the run resumes at the next batch with --ckpt_path RUN/checkpoints/last.ckpt",
            file=sys.stderr,
        )
        raise SystemExit(STOPPED) from None
    except SystemExit as ended:
        if isinstance(ended.__context__, KeyboardInterrupt):  # Lightning ends with exit code 1
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)
