"""A run of two processes that stops and resumes ends as if nothing had happened; one begun alone goes on with two."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from captioning.training.checkpoint_io import AtomicCheckpointIO
from captioning.training.processes import BatchNormSync
from captioning.training.stopping import Preemption
from helpers_training import make_data, make_module, make_shapes, make_trainer, run_stage
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.exceptions import SIGTERMException

from captioning.attention import AdditiveScore, HardAttention
from captioning.data.shapes import ShapesSource
from captioning.training.module import CaptioningModule

STEPS = 9  # 7 an epoch, of 8 captions


class Diary(pl.Callback):
    """What every batch was: its captions, the random numbers after it, and the logged loss."""

    def __init__(self) -> None:
        self.entries: list[tuple[list[list[int]], list[int], float]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        words = [ids[:n] for ids, n in zip(batch.captions.tolist(), (batch.lengths + 1).tolist(), strict=True)]
        self.entries.append((words, torch.get_rng_state().tolist(), float(trainer.callback_metrics["train/loss"])))


class Ask(pl.Callback):
    """Sends this process a scheduler's signal in the middle of its n-th step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_backward(self, trainer, module, loss) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def source_in(folder: Path) -> ShapesSource:
    return make_shapes(folder, train=10, val=4, test=3)


def soft(**options) -> CaptioningModule:
    return make_module(dropout=0.0, **options)


def hard() -> CaptioningModule:
    """Dropout, coins, draws and a baseline with a past."""
    return make_module(HardAttention(AdditiveScore(10), sample_probability=0.5))


def fit(
    folder: Path,
    module: CaptioningModule,
    *callbacks: pl.Callback,
    processes: int = 2,
    steps: int = STEPS,
    stops: bool = False,
    group: str = "length",
    **options: Any,
) -> list[Any]:
    """Train to step ``steps``, and return the diary; the batch of a step is 8 captions of all processes together."""
    diary = Diary()
    last = ModelCheckpoint(folder, "last", every_n_train_steps=4, save_on_exception=True, enable_version_counter=False)
    several = {"strategy": "ddp", "devices": processes} if processes > 1 else {}
    trainer = make_trainer(
        folder,
        max_epochs=-1,
        max_steps=steps,
        enable_checkpointing=True,
        callbacks=[last, diary, Preemption(), *callbacks],
        plugins=[AtomicCheckpointIO(), BatchNormSync()],
        **several,
    )
    data = make_data(source_in(folder.parent), batch_size=8 // processes, eval_batch_size=2, group=group)
    torch.manual_seed(41 if options else 40)  # what is drawn after a resume comes from the checkpoint, not from here
    with pytest.raises(SIGTERMException) if stops else nullcontext():
        run_stage(trainer.fit, module, data, **options)
    return diary.entries


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="test",
        GROUP_RANK="0",
    )
    path = Path(folder)
    found: dict[str, Any] = {}
    for name, make in (("soft", soft), ("hard", hard)):
        module = make()
        found[f"{name} whole"] = fit(path / f"{name}-whole", module)
        found[f"{name} whole weights"] = module.state_dict()
        # Asked at step 5 in one process alone; resumed at step 6.
        asked = path / f"{name}-asked"
        found[f"{name} first"] = fit(asked, make(), *([Ask(5)] if rank else []), stops=True)
        module = make()
        found[f"{name} rest"] = fit(asked, module, ckpt_path=asked / "last.ckpt", weights_only=True)
        found[f"{name} rest weights"] = module.state_dict()
    # As after SIGKILL at step 7: what step 4 left.
    fit(path / "killed", hard(), steps=7)
    found["killed rest"] = fit(path / "killed", hard(), ckpt_path=path / "killed/last.ckpt", weights_only=True)
    module = soft()
    checkpoint = path / "alone/last.ckpt"
    found["taken over"] = fit(path / "alone", module, group="image", ckpt_path=checkpoint, weights_only=True)
    found["taken over weights"] = module.state_dict()
    torch.save(found, path / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """What both processes found in all runs, and the folder; "alone" has the first six steps of one process."""
    folder = tmp_path_factory.mktemp("runs")
    source_in(folder)
    fit(folder / "alone", soft(), Ask(5), processes=1, stops=True, group="image")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, str(folder)), nprocs=2)
    return folder, [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", ["soft", "hard"])
def test_a_run_that_one_process_was_asked_to_stop_resumes_bitwise_in_both(runs, name):
    for found in runs[1]:
        whole, first, rest = found[f"{name} whole"], found[f"{name} first"], found[f"{name} rest"]
        assert (len(whole), len(first)) == (STEPS, 6)  # the step in progress was finished
        assert first + rest == whole
        for key, value in found[f"{name} whole weights"].items():
            assert torch.equal(found[f"{name} rest weights"][key], value), key


def test_a_killed_run_goes_on_from_its_last_checkpoint_bitwise(runs):
    for found in runs[1]:
        assert found["killed rest"] == found["hard whole"][4:]


def test_processes_end_with_the_same_weights_from_different_random_numbers_and_captions(runs):
    first, second = runs[1]
    for key, value in first["hard whole weights"].items():
        assert torch.equal(second["hard whole weights"][key], value), key
    for mine, theirs in zip(first["hard whole"], second["hard whole"], strict=True):
        assert mine[0] != theirs[0] and mine[1] != theirs[1]
        assert mine[2] == theirs[2]  # the loss of all
    assert len({tuple(entry[1]) for found in runs[1] for entry in found["hard whole"]}) == 2 * STEPS


def test_a_run_begun_by_one_process_goes_on_with_two_at_the_same_place(runs):
    """With batch norm in the encoder; where an image's captions are apart, it would count once in every process."""
    folder, ranks = runs
    module = soft()
    alone = fit(folder / "alone-to-the-end", module, processes=1, group="image")[6:]
    for (words, _, loss), *dealt in zip(alone, *(found["taken over"] for found in ranks), strict=True):
        assert sorted(words) == sorted(caption for part in dealt for caption in part[0])
        for part in dealt:
            assert part[2] == pytest.approx(loss, rel=1e-5)
    for key, value in module.state_dict().items():
        torch.testing.assert_close(ranks[0]["taken over weights"][key], value, rtol=1e-3, atol=1e-4)
