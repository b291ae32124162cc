"""Loading does not hang: processes that load images and die, find no shared memory, or never bring their batch."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers_training import last_checkpoint, make_data, make_module, make_shapes, make_trainer
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch.utils.data import Dataset

from captioning.data.batch import CaptionBatch
from captioning.data.loading import batch_loader
from captioning.data.records import CaptionIndex
from captioning.data.shapes import ShapesSource
from captioning.errors import exits_on_input_error
from captioning.training.callbacks import StopOnRequest

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


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
            if self.fault == "full":  # a file in /dev/shm may not become as large as this batch
                resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
            if self.fault == "never":
                time.sleep(1000)
        return CaptionBatch(*(torch.zeros(100, dtype=torch.int64) for _ in range(5)))


def load(fault: str, **options: float) -> list[CaptionBatch]:
    return list(batch_loader(Faulty(fault), [[n] for n in range(5)], num_workers=1, **options))


def test_without_a_fault_all_batches_come_in_shared_memory():
    batches = load("none")
    assert len(batches) == 5 and all(batch.index_rows.is_shared() for batch in batches)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("full", "error: /dev/shm is full (RuntimeError: unable to resize file </torch_"),
        ("killed", "error: a process that loads images died (DataLoader worker (pid"),
        ("no memory", "error: out of memory (MemoryError); lower the batch size"),
        ("never", "error: no batch came (DataLoader timed out after 1 seconds); does a disk hang?"),
    ],
)
def test_what_befalls_a_worker_is_one_line_with_what_to_do(capfd, fault, line):
    options = {"timeout": 1} if fault == "never" else {}
    main = multiprocessing.Process(target=exits_on_input_error(load), args=(fault,), kwargs=options)
    main.start()
    main.join(60)  # also where a worker does nothing any more
    errors = [text for text in capfd.readouterr().err.splitlines() if text.startswith("error: ")]
    assert main.exitcode == 2 and len(errors) == 1 and errors[0].startswith(line)
    assert "num_workers" in errors[0] or fault == "no memory"


class HangingIndex(CaptionIndex):
    """Images that never come."""

    def take(self, limit):
        return self

    def image(self, row, preprocessing):
        time.sleep(1000)


class Hanging(ShapesSource):
    """Shapes of which the images for validation never come."""

    def index(self, split: str) -> CaptionIndex:
        index = super().index(split)
        if split == "val":
            index.__class__ = HangingIndex
        return index


def train(folder: Path, workers: int) -> None:
    """Train until SIGTERM ends it, and print how many processes that load images are left."""
    data = make_data(Hanging(str(folder / "shapes"), train=2, val=1, test=1, image_size=48), num_workers=workers)
    trainer = make_trainer(folder, enable_checkpointing=True, callbacks=[StopOnRequest(), last_checkpoint(folder)])
    threading.Timer(2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    try:
        trainer.fit(make_module(), data)
    except SIGTERMException:
        print("left:", len(multiprocessing.active_children()))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_waits_for_a_batch_ends_by_sigterm_within_seconds_and_is_saved(tmp_path, workers):
    make_shapes(tmp_path, train=2, val=1, test=1)
    # A process of its own: where tests share one, its threads and signals may be another's.
    call = f"import pathlib, test_hanging; test_hanging.train(pathlib.Path({str(tmp_path)!r}), {workers})"
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    run = subprocess.run([sys.executable, "-c", call], env=environment, capture_output=True, text=True, timeout=120)
    assert "left: " in run.stdout, run.stderr
    assert int(run.stdout.rpartition("left: ")[2]) <= workers  # those of the training images, which do not wait
    assert (tmp_path / "last.ckpt").is_file()


def wait(pids) -> None:
    for _ in batch_loader(Faulty("never"), [[n] for n in range(5)], num_workers=1):
        pids.put([child.pid for child in multiprocessing.active_children()])


def test_a_worker_that_never_brings_its_batch_ends_after_its_main_process_was_killed():
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
