"""A run that was stopped or killed, and resumed, equals one that was not, to the last bit."""

import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers_training import Signal, assert_equal, last_checkpoint, make_data, make_module, make_shapes, make_trainer
from pytorch_lightning.callbacks import EMAWeightAveraging, GradientAccumulationScheduler
from pytorch_lightning.utilities.exceptions import SIGTERMException

from captioning.attention import AdditiveScore, HardAttention
from captioning.data.shapes import ShapesSource
from captioning.errors import InputError
from captioning.inference import load
from captioning.training import CaptioningModule, Unfreeze, WarmupCosine
from captioning.training.callbacks import ResumableEarlyStopping, StopOnRequest
from captioning.training.resume import compare_settings

STEPS, EPOCHS = 7, 3  # steps of an epoch


# Lightning does not know that the sampler begins at its batch, and warns of strategies that are not used.
pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides"),
]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> ShapesSource:
    return make_shapes(tmp_path_factory.mktemp("data"), train=10, val=4, test=3)


class Diary(pl.Callback):
    """The captions of every batch that was trained on, its random numbers, and the metrics of every validation."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.validated: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.entries.append((batch.captions.tolist(), torch.get_rng_state().tolist()))

    def on_validation_batch_start(self, trainer, module, *_: Any) -> None:
        self.validated.append({name: value.clone() for name, value in module.state_dict().items()})

    def on_validation_end(self, trainer, module) -> None:
        metrics = {name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith("val")}
        self.entries.append(repr(metrics))  # in which NaN equals NaN


class Crash(pl.Callback):
    """Raises in a hook at a step."""

    def __init__(self, hook: str, step: int) -> None:
        self.step = step
        setattr(self, hook, self.crash)

    def crash(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise KeyError("a crash")


def hard(**options: Any) -> CaptioningModule:
    """A module with dropout, semi-sampling, draws, statistics of the data, a moving average and a schedule."""
    attention = HardAttention(AdditiveScore(10), sample_probability=0.5)
    return make_module(attention, standardize=True, scheduler=lambda o, steps: WarmupCosine(o, steps, 2), **options)


def fit(shapes, folder: Path, *callbacks: pl.Callback, error: Any = None, data: Any = None, **options: Any):
    """Train, and return the module and the diary; ``resume=True`` resumes from FOLDER/last.ckpt."""
    resume = {"ckpt_path": folder / "last.ckpt", "weights_only": True} if options.pop("resume", False) else {}
    module, diary = (options.pop("make", hard))(), Diary()
    last = last_checkpoint(folder, **options.pop("last", {}))
    options = {"max_epochs": EPOCHS, "enable_checkpointing": True} | options
    trainer = make_trainer(folder, callbacks=[*callbacks, StopOnRequest(), diary, last], **options)
    torch.manual_seed(99 if resume else 3)
    with pytest.raises(error) if error else nullcontext():
        trainer.fit(module, make_data(shapes, **data or {}), **resume)
    return module, diary


@pytest.fixture(scope="module")
def whole(shapes, tmp_path_factory) -> tuple[CaptioningModule, Diary]:
    return fit(shapes, tmp_path_factory.mktemp("whole"))


@pytest.fixture
def hangup_signal() -> Iterator[None]:
    """Receive SIGHUP, the signal of a closed terminal, also under nohup, which ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup_signal")
@pytest.mark.parametrize(
    ("step", "workers", "number"),
    [
        pytest.param(3, 0, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(10, 2, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(10, 0, signal.SIGHUP, marks=pytest.mark.slow),
        (STEPS, 0, signal.SIGINT),
    ],
)
def test_a_stopped_run_finishes_its_step_and_resumes_equal(shapes, tmp_path, whole, step, workers, number):
    data = {"num_workers": workers}
    _, first = fit(shapes, tmp_path, Signal(step, number), error=SIGTERMException, data=data)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == step
    resumed, rest = fit(shapes, tmp_path, resume=True, data=data)
    assert first.entries + rest.entries == whole[1].entries
    assert_equal(whole[0].state_dict(), resumed.state_dict())


@pytest.mark.slow
def test_a_validation_in_progress_is_finished_and_not_repeated(shapes, tmp_path, whole):
    class Ask(pl.Callback):
        def on_validation_start(self, trainer, module) -> None:
            if trainer.global_step == STEPS:
                signal.raise_signal(signal.SIGTERM)

    _, first = fit(shapes, tmp_path, Ask(), error=SIGTERMException)
    resumed, rest = fit(shapes, tmp_path, resume=True)
    assert first.entries + rest.entries == whole[1].entries
    assert_equal(whole[0].state_dict(), resumed.state_dict())


@pytest.mark.parametrize(
    ("hook", "step", "last", "goes_on_at"),
    [
        ("on_train_batch_start", 10, {"save_on_exception": False}, STEPS),  # as after SIGKILL: the epoch is repeated
        ("on_train_batch_start", 10, {"every_n_train_steps": 4, "save_on_exception": False}, 8),
        pytest.param("on_train_epoch_start", STEPS, {}, STEPS, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_from_its_last_checkpoint(shapes, tmp_path, whole, hook, step, last, goes_on_at):
    fit(shapes, tmp_path, Crash(hook, step), error=KeyError, last=last)
    resumed, rest = fit(shapes, tmp_path, resume=True, last=last)
    skipped = goes_on_at + goes_on_at // STEPS  # steps and validations
    assert rest.entries == whole[1].entries[skipped:]
    assert_equal(whole[0].state_dict(), resumed.state_dict())


def test_a_run_that_was_killed_between_an_epoch_s_last_batch_and_its_end_can_be_killed_again(shapes, tmp_path, whole):
    last = {"every_n_train_steps": 1, "save_on_exception": False}
    fit(shapes, tmp_path, Crash("on_validation_start", STEPS), error=KeyError, last=last)
    fit(shapes, tmp_path, Crash("on_train_batch_start", 10), error=KeyError, resume=True, last=last)
    resumed, rest = fit(shapes, tmp_path, resume=True, last=last)
    assert rest.entries == whole[1].entries[11:]  # ten steps and a validation
    assert_equal(whole[0].state_dict(), resumed.state_dict())


@pytest.mark.slow
def test_a_run_that_stops_before_its_first_batch_keeps_its_place(shapes, tmp_path, whole):
    fit(shapes, tmp_path, Signal(10), error=SIGTERMException)
    fit(shapes, tmp_path, Crash("on_train_start", 10), error=KeyError, resume=True)
    resumed, _ = fit(shapes, tmp_path, resume=True)
    assert_equal(whole[0].state_dict(), resumed.state_dict())


def test_a_limited_epoch_is_resumed_at_its_next_batch(shapes, tmp_path):
    expected, diary = fit(shapes, tmp_path, limit_train_batches=5)
    _, first = fit(shapes, tmp_path, Signal(7), error=SIGTERMException, limit_train_batches=5)
    resumed, rest = fit(shapes, tmp_path, resume=True, limit_train_batches=5)
    assert first.entries + rest.entries == diary.entries
    assert_equal(expected.state_dict(), resumed.state_dict())


class TimeIsUp(pl.Callback):
    """Ends training as Lightning's timer of ``max_time`` does, but at a batch of a known number, counted from 1."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop |= trainer.fit_loop.total_batch_idx + 1 >= self.batch


def never_better(patience: int) -> ResumableEarlyStopping:
    return ResumableEarlyStopping("val/nll", mode="max", min_delta=100, patience=patience)


def accumulating(shapes, folder: Path, *callbacks: pl.Callback, patience: int = 100, **options: Any):
    """Two epochs of 7 batches in 3 steps, of 3, 3 and 1 batches, validated after 4 batches."""
    callbacks = GradientAccumulationScheduler({0: 3}), never_better(patience), *callbacks
    options = {"max_epochs": 2, "val_check_interval": 4} | options

    def module() -> CaptioningModule:  # without a schedule, whose length would be that of the shorter run
        return make_module(HardAttention(AdditiveScore(10), sample_probability=0.5), standardize=True)

    return fit(shapes, folder, *callbacks, make=module, **options)


@pytest.fixture(scope="module")
def accumulated(shapes, tmp_path_factory) -> tuple[Path, CaptioningModule, Diary]:
    folder = tmp_path_factory.mktemp("accumulated")
    return folder, *accumulating(shapes, folder)


@pytest.mark.parametrize(
    ("cut", "options", "rest", "step"),
    [
        pytest.param([], {"max_steps": 4}, {}, 4, id="max_steps", marks=pytest.mark.slow),
        pytest.param([], {"max_steps": 4}, {"max_steps": 6}, 4, id="more max_steps", marks=pytest.mark.slow),
        pytest.param(
            [], {"max_steps": 3}, {"max_steps": 6}, 3, id="max_steps at an epoch's end", marks=pytest.mark.slow
        ),
        pytest.param([TimeIsUp(11)], {}, {}, 5, id="max_time"),
        pytest.param([], {"patience": 1}, {}, 5, id="early stopping", marks=pytest.mark.slow),
        pytest.param([Signal(5)], {"error": SIGTERMException}, {}, 5, id="SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_ended_inside_an_epoch_or_a_step_resumes_there(
    shapes, tmp_path, accumulated, cut, options, rest, step
):
    folder, whole, diary = accumulated
    _, first = accumulating(shapes, tmp_path, *cut, **options)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == step
    resumed, last = accumulating(shapes, tmp_path, resume=True, **rest)
    assert last.entries == diary.entries[-len(last.entries) :]  # batches and the validations that were due
    trained = [entry for entry in first.entries + last.entries if isinstance(entry, tuple)]
    assert trained == [entry for entry in diary.entries if isinstance(entry, tuple)]
    assert_equal(whole.state_dict(), resumed.state_dict())
    ends = [torch.load(path / "last.ckpt", weights_only=True)["callbacks"].values() for path in (folder, tmp_path)]
    counts = [[state["wait_count"] for state in end if "wait_count" in state] for end in ends]
    assert counts[0] == counts[1] == [1]


class CrashInside(pl.Callback):
    """Raises in a batch, counted from 0."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            raise KeyError("a crash")


@pytest.mark.parametrize("batch", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_a_crash_inside_a_step_of_several_batches_loses_none_of_their_gradients(shapes, tmp_path, batch):
    def run(folder: str, *callbacks: pl.Callback, **options: Any) -> CaptioningModule:
        # With dropout, but without statistics, which see the batches twice.
        options |= {"make": make_module, "max_epochs": 2, "accumulate_grad_batches": 3}
        return fit(shapes, tmp_path / folder, *callbacks, **options)[0]

    whole = run("whole")
    run("cut", CrashInside(batch), error=KeyError)
    resumed = run("cut", resume=True)
    assert_equal(dict(whole.named_parameters()), dict(resumed.named_parameters()))


@pytest.mark.slow
def test_the_encoder_stays_frozen_where_a_run_resumes_inside_an_epoch(shapes, tmp_path):
    fit(shapes, tmp_path, Unfreeze(2), Signal(10), error=SIGTERMException)
    before = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    resumed, _ = fit(shapes, tmp_path, Unfreeze(2), resume=True, max_epochs=2)
    for name, parameter in resumed.captioner.encoder.named_parameters():
        assert torch.equal(before[f"captioner.encoder.{name}"], parameter)


def ema() -> EMAWeightAveraging:
    return EMAWeightAveraging(decay=0.8, use_buffers=False)


def test_averaged_weights_are_validated_saved_and_captioned_with(shapes, tmp_path):
    module, diary = fit(shapes, tmp_path, ema())
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert_equal(checkpoint["state_dict"], module.state_dict())  # after training
    assert_equal(checkpoint["state_dict"], diary.validated[-1])
    name = "captioner.decoder.output.L_o.weight"
    assert not torch.equal(checkpoint["state_dict"][name], checkpoint["current_model_state"][name])
    statistics = "captioner.decoder.feature_norm.running_mean"  # of the data, which have no average
    assert torch.equal(checkpoint["state_dict"][statistics], checkpoint["current_model_state"][statistics])
    loaded = load(tmp_path / "last.ckpt").model.state_dict()
    assert torch.equal(loaded["decoder.output.L_o.weight"], checkpoint["state_dict"][name])


@pytest.mark.slow
def test_averaging_does_not_disturb_training_and_resumes_equal(shapes, tmp_path, whole):
    expected, diary = fit(shapes, tmp_path, ema())
    of_batches = [entry for entry in whole[1].entries if isinstance(entry, tuple)]
    assert [entry for entry in diary.entries if isinstance(entry, tuple)] == of_batches
    fit(shapes, tmp_path, ema(), Signal(10), error=SIGTERMException)
    resumed, rest = fit(shapes, tmp_path, ema(), resume=True)
    assert diary.entries[-len(rest.entries) :] == rest.entries
    assert_equal(expected.state_dict(), resumed.state_dict())


def test_settings_that_differ_from_the_checkpoints_are_printed(shapes, tmp_path, capsys):
    def run(settings: dict[str, Any], epochs: int, **resume: Any) -> None:
        module = make_module(settings=settings)
        trainer = make_trainer(tmp_path, max_epochs=epochs)
        trainer.fit(module, make_data(shapes), **resume)
        trainer.save_checkpoint(tmp_path / "x.ckpt")

    before = {"trainer": {"max_epochs": 1, "devices": 1}, "model": {"lr": 0.1}, "name": "a"}
    run(before, 1)
    after = {"trainer": {"max_epochs": 2, "devices": 1}, "model": {"lr": 0.2}, "name": "b"}
    run(after, 2, ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    assert "from the checkpoint's: trainer.max_epochs: 2, was 1; model.lr: 0.2, was 0.1\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("optimizer", "class_path", "SGD"),
        ("optimizer", "lr", 0.2),
        ("scheduler", "class_path", "Cosine"),
        ("encoder", "learning_rate", 0.2),
    ],
)
def test_settings_that_decide_the_state_of_training_cannot_change(section, name, value):
    def settings(value: Any) -> dict[str, Any]:
        init_args = {} if name == "class_path" else {name: value}
        return {"processes": 1, "model": {section: {"class_path": "own.Class", "init_args": init_args} | {name: value}}}

    progress = {"current": {"ready": 0}, "is_last_batch": True}
    checkpoint = {"loops": {"fit_loop": {"epoch_loop.batch_progress": progress}}, "processes": 1}
    checkpoint["captioning"] = {"settings": settings("old")}
    compare_settings(checkpoint, settings("old"))
    with pytest.raises(
        InputError, match=rf"^model\.{section}.* cannot change to {value} in a resumed run; keep old, or"
    ):
        compare_settings(checkpoint, settings(value))


@pytest.mark.slow
def test_an_epoch_that_began_with_other_batches_is_not_resumed(shapes, tmp_path):
    def run(batch_size: int, epochs: int, steps: int, **resume: Any) -> None:
        module = make_module(settings={"data": {"batch_size": batch_size}})
        trainer = make_trainer(tmp_path, max_epochs=epochs, max_steps=steps)
        trainer.fit(module, make_data(shapes, batch_size=batch_size), **resume)
        trainer.save_checkpoint(tmp_path / "x.ckpt")

    resume = {"ckpt_path": tmp_path / "x.ckpt", "weights_only": True}
    run(8, 1, 2)
    with pytest.raises(InputError, match=r"^data\.batch_size cannot change to 16 inside an epoch; keep 8, or"):
        run(16, 1, -1, **resume)
    run(8, 1, -1, **resume)
    run(16, 2, -1, **resume)  # an epoch of its own


def test_a_run_that_gets_more_epochs_has_the_schedule_of_a_longer_run(shapes, tmp_path):
    class Rates(pl.Callback):
        def on_train_batch_start(self, trainer, *_: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def run(epochs: int, **resume: Any) -> None:
        module = make_module(scheduler=WarmupCosine, settings={"max_epochs": epochs})
        trainer = make_trainer(tmp_path, max_epochs=epochs, callbacks=[Rates()])
        trainer.fit(module, make_data(shapes), **resume)
        trainer.save_checkpoint(tmp_path / "x.ckpt")

    rates: list[float] = []
    run(2)
    expected = rates.copy()
    rates.clear()
    run(1)
    run(2, ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    assert rates[STEPS:] == expected[STEPS:]
