"""Processes that load images and die, find no memory, or lose their main process."""

import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from captioning.data.batch import CaptionBatch
from captioning.data.loading import batch_loader
from captioning.errors import exits_on_input_error

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def torn() -> None:
    raise ConnectionResetError("Connection reset by peer")


class Torn(CaptionBatch):
    """A batch whose process dies while it sends the batch: the main process reads half of it."""

    def __reduce__(self) -> tuple:
        return torn, ()


class Faulty(Dataset):
    """Batches of which the third one has a fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __getitem__(self, numbers: list[int]) -> CaptionBatch:
        if numbers == [2]:
            if self.fault == "killed":  # as by the system, where memory is short
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "no memory":
                raise MemoryError
            if self.fault == "files":  # PyTorch's words
                raise RuntimeError("Too many open files. Communication with the workers is no longer possible.")
            if self.fault == "full":  # a file in /dev/shm may not become as large as this batch
                resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
            if self.fault == "never":
                time.sleep(1000)
        batch_type = Torn if self.fault == "torn" else CaptionBatch
        return batch_type(*(torch.zeros(100, dtype=torch.int64) for _ in range(5)))


def load(fault: str) -> list[CaptionBatch]:
    return list(batch_loader(Faulty(fault), [[n] for n in range(5)], num_workers=1))


def test_without_a_fault_all_batches_come_in_shared_memory():
    batches = load("none")
    assert len(batches) == 5 and all(batch.index_rows.is_shared() for batch in batches)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("full", "error: /dev/shm is full (RuntimeError: unable to resize file </torch_"),
        ("killed", "error: a process that loads images died ("),
        ("torn", "error: a process that loads images died (Connection reset by peer), often for lack of memory;"),
        ("files", "error: too many open files; raise the limit (ulimit -n 65536), or lower num_workers"),
        ("no memory", "error: out of memory (MemoryError); lower the batch size"),
    ],
)
def test_a_fault_of_a_loading_process_is_one_line_with_a_remedy(capfd, fault, line):
    main = multiprocessing.Process(target=exits_on_input_error(load), args=(fault,))
    main.start()
    main.join(60)  # also where a worker does nothing any more
    errors = [text for text in capfd.readouterr().err.splitlines() if text.startswith("error: ")]
    assert main.exitcode == 2 and len(errors) == 1 and errors[0].startswith(line)
    assert "num_workers" in errors[0] or fault == "no memory"


def wait(pids) -> None:
    for _ in batch_loader(Faulty("never"), [[n] for n in range(5)], num_workers=1):
        pids.put([child.pid for child in multiprocessing.active_children()])


def test_a_hanging_worker_ends_after_its_main_process_was_killed():
    pids = multiprocessing.Queue()
    main = multiprocessing.Process(target=wait, args=(pids,))
    main.start()
    (worker,) = pids.get(timeout=60)
    main.kill()
    main.join()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{worker}/stat").exists() and Path(f"/proc/{worker}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.1)
