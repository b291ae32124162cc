"""What the configuration says of a resumed run wins over its checkpoint, and all else goes on exactly."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from captioning.training.resumed_settings import ResumedSettings
from captioning.training.stopping import Preemption
from helpers_training import last_checkpoint, make_data, make_module, make_shapes, make_trainer, run_stage
from pytorch_lightning.callbacks import EarlyStopping, GradientAccumulationScheduler
from torch.optim.lr_scheduler import CosineAnnealingLR, PolynomialLR

from captioning.data.shapes import ShapesSource
from captioning.training.callbacks import Unfreeze
from captioning.training.schedules import WarmupCosine

STEPS = 7  # of an epoch
RATE = 3e-3
SCHEDULES = {
    "none": None,
    "warm-up": lambda optimizer, steps: WarmupCosine(optimizer, steps, 2),
    "cosine": lambda optimizer, steps: CosineAnnealingLR(optimizer, steps),
}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> ShapesSource:
    return make_shapes(tmp_path_factory.mktemp("data"), train=10, val=2, test=2)


class Diary(pl.Callback):
    """The optimizer's numbers at every step, and a signal after one of the batches."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.rates: list[float] = []
        self.decays: list[float] = []
        self.frozen: list[bool] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        group = trainer.optimizers[0].param_groups[0]
        self.rates.append(group["lr"])
        self.decays.append(group["weight_decay"])
        self.frozen.append(module.encoder.frozen)
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.stop_after:
            signal.raise_signal(signal.SIGTERM)


def fit(shapes, folder: Path, *callbacks: pl.Callback, optimizer: Any, schedule: Any = None, **options: Any) -> Any:
    module = make_module(scheduler=schedule)
    module.optimizer = optimizer
    resume = {name: options.pop(name) for name in ("ckpt_path",) if name in options}
    data = make_data(shapes, **{name: options.pop(name) for name in ("eval_batch_size",) if name in options})
    callbacks = (ResumedSettings(), *callbacks, Preemption(), last_checkpoint(folder))
    options = {"max_epochs": 2, "enable_checkpointing": True} | options
    trainer = make_trainer(folder, callbacks=list(callbacks), **options)
    try:
        run_stage(trainer.fit, module, data, **resume, **({"weights_only": True} if resume else {}))
    except pl.utilities.exceptions.SIGTERMException:
        assert not resume
    return trainer, module


def adam(rate: float, decay: float = 0.0) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, lr=rate, weight_decay=decay)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stop_after", [4, STEPS + 2])
def test_a_resumed_run_has_the_configured_rate_and_the_schedule_goes_on(shapes, tmp_path, schedule, stop_after):
    whole, resumed = Diary(), Diary()
    fit(shapes, tmp_path / "whole", whole, optimizer=adam(RATE), schedule=SCHEDULES[schedule])
    fit(shapes, tmp_path, Diary(stop_after), optimizer=adam(RATE), schedule=SCHEDULES[schedule])
    resume = {"schedule": SCHEDULES[schedule], "ckpt_path": tmp_path / "last.ckpt"}
    fit(shapes, tmp_path, resumed, optimizer=adam(RATE / 10, 0.25), **resume)
    assert len(whole.rates) == 2 * STEPS and len(resumed.rates) == 2 * STEPS - stop_after
    assert resumed.rates == pytest.approx([rate / 10 for rate in whole.rates[stop_after:]])
    assert set(resumed.decays) == {0.25}


def test_with_the_same_settings_a_resumed_run_is_that_which_was_never_stopped(shapes, tmp_path):
    options = {"optimizer": adam(RATE, 0.1), "schedule": SCHEDULES["cosine"]}
    _, whole = fit(shapes, tmp_path / "whole", **options)
    fit(shapes, tmp_path, Diary(4), **options)
    diary = Diary()
    _, resumed = fit(shapes, tmp_path, diary, **options, ckpt_path=tmp_path / "last.ckpt")
    assert len(diary.rates) == 2 * STEPS - 4
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=0, msg=name)


def test_a_run_that_max_steps_ended_inside_an_epoch_goes_on_there(shapes, tmp_path):
    options = {"optimizer": adam(RATE)}
    _, whole = fit(shapes, tmp_path / "whole", **options)
    fit(shapes, tmp_path, **options, max_steps=4)
    trainer, resumed = fit(shapes, tmp_path, **options, ckpt_path=tmp_path / "last.ckpt")
    assert trainer.global_step == 2 * STEPS and trainer.current_epoch == 2
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=0, msg=name)


class FailingValidation(pl.Callback):
    """Fails at an image of the first validation, and counts the images that are validated."""

    def __init__(self, fail: bool) -> None:
        self.fail, self.images = fail, 0

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if self.fail and batch_idx == 1:
            raise MemoryError
        self.images += len(batch.image_ids)


def test_after_an_error_in_a_validation_the_resumed_run_validates_all_images(shapes, tmp_path):
    options = {"optimizer": adam(RATE), "limit_val_batches": 1.0, "eval_batch_size": 1, "max_epochs": 1}
    with pytest.raises(MemoryError):
        fit(shapes, tmp_path, FailingValidation(True), **options)
    counted = FailingValidation(False)
    trainer, _ = fit(shapes, tmp_path, counted, **options, ckpt_path=tmp_path / "last.ckpt")
    assert counted.images == 2 and trainer.global_step == STEPS


def polynomial(optimizer: torch.optim.Optimizer, steps: int) -> PolynomialLR:
    return PolynomialLR(optimizer, steps)


@pytest.mark.parametrize("schedule", [SCHEDULES["cosine"], polynomial])
def test_a_run_that_gets_more_epochs_has_the_schedule_of_a_longer_run(shapes, tmp_path, schedule):
    whole, resumed = Diary(), Diary()
    fit(shapes, tmp_path / "whole", whole, optimizer=adam(RATE), schedule=schedule)
    fit(shapes, tmp_path, optimizer=adam(RATE), schedule=schedule, max_epochs=1)
    fit(shapes, tmp_path, resumed, optimizer=adam(RATE), schedule=schedule, ckpt_path=tmp_path / "last.ckpt")
    assert resumed.rates == pytest.approx(whole.rates[STEPS:])


class Counting(torch.optim.SGD):
    """Keeps a count among a group's numbers, as optimizers without a schedule do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_what_an_optimizer_counts_among_its_numbers_goes_on(shapes, tmp_path):
    def counting(parameters):
        optimizer = Counting(parameters, lr=RATE)
        for group in optimizer.param_groups:
            group["k"] = 0
        return optimizer

    fit(shapes, tmp_path, Diary(4), optimizer=counting)
    trainer, _ = fit(shapes, tmp_path, optimizer=counting, ckpt_path=tmp_path / "last.ckpt")
    assert trainer.optimizers[0].param_groups[0]["k"] == 2 * STEPS


def test_a_schedule_that_is_new_in_a_resumed_run_begins_with_the_rate(shapes, tmp_path, capsys):
    diary = Diary()
    fit(shapes, tmp_path, Diary(4), optimizer=adam(RATE))
    fit(shapes, tmp_path, diary, optimizer=adam(RATE), schedule=SCHEDULES["cosine"], ckpt_path=tmp_path / "last.ckpt")
    assert diary.rates[0] == RATE and diary.rates == sorted(diary.rates, reverse=True)


def test_a_run_that_stopped_early_stays_stopped_unless_it_is_given_more_patience(shapes, tmp_path):
    def run(patience: int, **options: Any) -> int:
        stopping = EarlyStopping("val/nll", mode="max", patience=patience)  # it falls: nothing is ever better
        trainer, _ = fit(shapes, tmp_path, stopping, optimizer=adam(RATE), max_epochs=9, **options)
        return trainer.global_step

    steps = run(2)
    assert steps == 3 * STEPS
    checkpoint = {"ckpt_path": tmp_path / "last.ckpt"}
    assert run(2, **checkpoint) == steps
    assert run(2, **checkpoint) == steps
    assert run(4, **checkpoint) == 5 * STEPS


def test_an_encoder_stays_frozen_in_a_run_that_resumes_inside_an_epoch(shapes, tmp_path):
    resumed = Diary()
    fit(shapes, tmp_path, Unfreeze(1), Diary(4), optimizer=adam(RATE))
    fit(shapes, tmp_path, Unfreeze(1), resumed, optimizer=adam(RATE), ckpt_path=tmp_path / "last.ckpt")
    assert resumed.frozen == [True] * (STEPS - 4) + [False] * STEPS


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize(("stop_after", "stopped"), [(1, 3), (2, 3), (4, 6), (STEPS, STEPS)])
def test_a_run_that_accumulates_gradients_stops_after_a_step_of_theirs(
    shapes, tmp_path, stop_after, stopped, scheduled
):
    """A checkpoint has no gradients: those of a window that was half done would be lost."""

    def run(folder: Path, diary: Diary, **resume: Any) -> Any:
        callbacks = [GradientAccumulationScheduler({0: 3})] if scheduled else []
        options = {} if scheduled else {"accumulate_grad_batches": 3}
        return fit(shapes, folder, *callbacks, diary, optimizer=adam(RATE), **options, **resume)

    _, whole = run(tmp_path / "whole", Diary())
    run(tmp_path, Diary(stop_after))
    rest = Diary()
    _, resumed = run(tmp_path, rest, ckpt_path=tmp_path / "last.ckpt")
    assert len(rest.rates) == 2 * STEPS - stopped
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=0, msg=name)
