"""Training that diverges or is interrupted: what is kept, and that a resumed run goes on as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from captioning.training.divergence import Diverged, StopOnDivergence, all_finite
from captioning.training.stopping import STOPPED, Preemption, ends_after_the_step
from helpers_faults import Fault, faults, proves
from helpers_runs import tiny_config
from helpers_training import last_checkpoint, make_data, make_module, make_shapes, make_trainer, run_stage

from captioning.data.shapes import ShapesSource
from captioning.training.schedules import WarmupCosine

STEPS = 7  # of an epoch


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> ShapesSource:
    return make_shapes(tmp_path_factory.mktemp("data"), train=10, val=4, test=3)


class Poison(pl.Callback):
    """Makes the images, or the gradient, of one step NaN, and remembers the images' numbers."""

    def __init__(self, what: str, step: int) -> None:
        self.what, self.step = what, step
        self.image_ids: list[int] = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if trainer.global_step == self.step - 1:
            self.image_ids = batch.image_ids.tolist()
            if self.what == "images":
                batch.images[0, 0, 0, 0] = float("nan")

    def on_after_backward(self, trainer, module) -> None:
        if trainer.global_step == self.step - 1 and self.what == "gradient":
            next(p for p in module.captioner.decoder.parameters() if p.grad is not None).grad.flatten()[0] = float(
                "nan"
            )


DIVERGED = {
    Fault(
        "a loss that is not finite",
        "training has diverged: the loss is not finite at step",
        kept="last.ckpt",
    ): (
        "images",
        STEPS + 3,
        3,
    ),
    Fault(
        "a gradient that is not finite",
        "training has diverged: the gradient is not finite at step",
        kept="last.ckpt",
    ): (
        "gradient",
        STEPS + 3,
        3,
    ),
    Fault(
        "the same in the last step before a validation",
        "training has diverged: the gradient is not finite at step",
        kept="last.ckpt",
    ): ("gradient", 2 * STEPS, STEPS),
}


@faults(DIVERGED)
def test_divergence_ends_training_at_once_and_names_the_batch(shapes, tmp_path, fault, case):
    what, step, number = case
    poison = Poison(what, step)
    trainer = make_trainer(
        tmp_path,
        max_epochs=3,
        enable_checkpointing=True,
        callbacks=[StopOnDivergence(), poison, last_checkpoint(tmp_path)],
    )
    module = make_module()
    with pytest.raises(Diverged) as caught:
        run_stage(trainer.fit, module, make_data(shapes))
    message = str(caught.value)
    assert fault.sees in message
    shown = ", ".join(map(str, poison.image_ids[:8]))
    assert f"at step {step} (batch {number} of the epoch, images {shown})" in message
    assert "lower learning rate" in message and "gradient_clip_val" in message and "precision" in message
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == STEPS and all_finite(saved["state_dict"].values())
    assert trainer.global_step == step - 1  # found before the step was made
    assert all_finite(module.parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_any_element_that_is_not_finite_is_found(value):
    whole = [torch.full((3, 4), 3e38), torch.zeros(0), torch.tensor([7])]
    assert all_finite(whole)
    assert not all_finite([*whole, torch.tensor([1.0, value, 2.0])])


@proves(Fault("cached features that are not finite", "cached features are not finite at step"))
def test_features_that_are_not_finite_are_named(shapes, tmp_path, fault):
    class AsFeatures(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
            batch.annotations = module.encoder(batch.images).detach()
            batch.images = None
            if trainer.global_step == 2:
                batch.annotations[0, 0, 0] = float("nan")

    trainer = make_trainer(tmp_path, callbacks=[StopOnDivergence(), AsFeatures()])
    with pytest.raises(Diverged, match=rf"{fault.sees} 3 .*extract them again"):
        run_stage(trainer.fit, make_module(), make_data(shapes))


@pytest.mark.gpu
def test_divergence_on_a_gpu_is_found_before_a_save_and_names_its_first_step(shapes, tmp_path):
    poison = Poison("images", STEPS + 3)
    trainer = make_trainer(
        tmp_path,
        accelerator="gpu",
        devices=1,
        max_epochs=3,
        enable_checkpointing=True,
        callbacks=[StopOnDivergence(), poison, last_checkpoint(tmp_path)],
    )
    with pytest.raises(Diverged, match=rf"not finite at step {STEPS + 3} \(batch 3 of the epoch, images"):
        run_stage(trainer.fit, make_module(), make_data(shapes))
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == STEPS


class CtrlC(pl.Callback):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        self.step, self.number = step, number

    def on_before_backward(self, trainer, module, loss) -> None:
        if trainer.global_step == self.step - 1:
            os.kill(os.getpid(), self.number)


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def scheduled() -> Any:
    return make_module(scheduler=lambda optimizer, steps: WarmupCosine(optimizer, steps, 2))


@pytest.mark.parametrize("step", [1, 3, STEPS, STEPS + 1])
@pytest.mark.parametrize("workers", [0, 1])
@proves(Fault("Ctrl-C inside a step", "", 130, "last.ckpt, after that step; a resumed run is equal to the last bit"))
def test_a_run_interrupted_inside_a_step_goes_on_to_the_last_bit(shapes, tmp_path, capfd, step, workers, fault):
    def fit(*callbacks: pl.Callback, **options: Any) -> Any:
        module = scheduled()
        trainer = make_trainer(
            tmp_path, max_epochs=2, enable_checkpointing=True, callbacks=[*callbacks, last_checkpoint(tmp_path)]
        )
        run_stage(trainer.fit, module, make_data(shapes, num_workers=workers), **options)
        return module

    whole = weights(fit())
    with pytest.raises(KeyboardInterrupt), ends_after_the_step():
        fit(CtrlC(step))
    assert "ending after this step" in capfd.readouterr().err
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == step
    torch.manual_seed(99)
    resumed = weights(fit(ckpt_path=tmp_path / "last.ckpt", weights_only=True))
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0, msg=name)


@proves(Fault("SIGTERM inside a step", "", 143, "last.ckpt, after that step"))
def test_sigterm_is_not_taken_for_success(shapes, tmp_path, fault):
    callbacks = [CtrlC(3, signal.SIGTERM), last_checkpoint(tmp_path)]
    trainer = make_trainer(tmp_path, enable_checkpointing=True, callbacks=callbacks)
    with pytest.raises(SystemExit) as ended, ends_after_the_step():
        run_stage(trainer.fit, make_module(), make_data(shapes))
    assert ended.value.code == STOPPED == fault.code
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3


def asked_to_stop(shapes: Any, folder: Path, number: int) -> int:
    """Send a signal inside the third step and return the exit code; 0 if the run went on."""
    callbacks = [Preemption(), CtrlC(3, number), last_checkpoint(folder)]
    trainer = make_trainer(folder, enable_checkpointing=True, callbacks=callbacks)
    try:
        with ends_after_the_step():
            run_stage(trainer.fit, make_module(), make_data(shapes))
    except SystemExit as ended:
        assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 3
        return ended.code
    return 0


def test_sigusr1_under_slurm_is_sigterm(shapes, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert asked_to_stop(shapes, tmp_path, signal.SIGUSR1) == STOPPED


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="terminals of Unix")
@pytest.mark.parametrize("ignored", [False, True])
@proves(Fault("SIGHUP inside a step: the terminal closed", "", 143, "last.ckpt, after that step; with nohup: the run"))
def test_sighup_is_sigterm_unless_nohup_ignores_it(shapes, tmp_path, ignored, fault):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        assert asked_to_stop(shapes, tmp_path, signal.SIGHUP) == (0 if ignored else fault.code)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_before_training_ctrl_c_interrupts_at_once():
    with pytest.raises(KeyboardInterrupt), ends_after_the_step():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny_config(folder / "shapes", train=30)))
    command = [sys.executable, "-m", "captioning", "fit", "--config", "tiny.yaml", "--trainer.max_epochs", "100000"]
    return subprocess.Popen(
        [*command, "--early_stopping.patience", "100000", *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
@proves(Fault("Ctrl-C at the terminal, workers included", "interrupted", 130, "last.ckpt"))
def test_ctrl_c_at_the_terminal_ends_with_130_and_a_checkpoint(tmp_path, fault):
    process = start(tmp_path, "--data.num_workers", "1")
    assert process.stdout is not None
    while not process.stdout.readline().startswith("epoch 1,"):
        pass
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == fault.code, err
    assert err.strip().splitlines()[-1] == fault.sees and "Traceback" not in err
    assert re.search(r"ending after this step", err)
    assert torch.load(tmp_path / "runs/tiny/checkpoints/last.ckpt", weights_only=True)["global_step"] > 0


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(tmp_path):
    process = start(tmp_path)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("epoch 2,"):
        pass
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.002)
    process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 130)  # 130: the step had ended before the second
    assert torch.load(tmp_path / "runs/tiny/checkpoints/last.ckpt", weights_only=True)["global_step"] > 0
