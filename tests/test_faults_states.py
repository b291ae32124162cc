"""The state of training in a checkpoint that was edited is refused before training goes on, whatever was changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_faults import Fault, ends, faults
from helpers_runs import edit_checkpoint, tiny_config
from helpers_training import enter_copy, trained_folder

from captioning.cli.fit import main
from captioning.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")
RUN = Path("runs/tiny")
LAST = RUN / "checkpoints/last.ckpt"
Edit = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a run of one epoch, with a schedule."""
    folder = tmp_path_factory.mktemp("trained")
    config = tiny_config(Path("shapes"))
    config["model"]["optimizer"] = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001}}
    config["model"]["scheduler"] = {"class_path": "captioning.training.WarmupCosine", "init_args": {"warmup_steps": 1}}
    return trained_folder(folder, config)


@pytest.fixture
def workdir(trained, tmp_path, monkeypatch) -> Path:
    """A copy of it, entered."""
    return enter_copy(trained, tmp_path / "work", monkeypatch)


def callback(kind: str, **changes: Any) -> Edit:
    def edit(content: dict[str, Any]) -> None:
        (state,) = (state for name, state in content["callbacks"].items() if name.startswith(kind))
        state.update(changes)

    return edit


def loops(name: str, **changes: Any) -> Edit:
    return lambda content: content["loops"]["fit_loop"][name].update(changes)


def optimizer(**changes: Any) -> Edit:
    return lambda content: content["optimizer_states"][0]["state"][0].update(changes)


def without(*path: Any) -> Edit:
    def edit(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return edit


EDITED = {
    Fault("a resumed run that waited for `x` validations", "StopEarly.wait_count is 'x', no int"): callback(
        "StopEarly", wait_count="x"
    ),
    Fault("a resumed run whose best score is a text", "StopEarly.best_score is 'x', no number"): callback(
        "StopEarly", best_score="x"
    ),
    Fault("a resumed run whose best checkpoints are a list", "its best_k_models is no dict"): callback(
        "BestCheckpoint", best_k_models=[]
    ),
    Fault(
        "a resumed run whose worst checkpoint is none of the best", "kth_best_model_path is none of best_k"
    ): callback("BestCheckpoint", kth_best_model_path="nan"),
    Fault("a resumed run whose best checkpoint's score is a list", "current_score is list"): callback(
        "BestCheckpoint", current_score=[1]
    ),
    Fault("a resumed run whose callback lacks its NLL", "StopEarly.nll is missing"): lambda content: [
        state.pop("nll") for name, state in content["callbacks"].items() if name.startswith("StopEarly")
    ],
    Fault("a resumed run that counts batches in text", "batch_progress.current is 'x', no dict"): loops(
        "epoch_loop.batch_progress", current="x"
    ),
    Fault("a resumed run whose last batch is a number", "batch_progress.is_last_batch is 3, no bool"): loops(
        "epoch_loop.batch_progress", is_last_batch=3
    ),
    Fault("a resumed run without its epochs", "epoch_progress is missing"): without(
        "loops", "fit_loop", "epoch_progress"
    ),
    Fault("a resumed run whose loader's position is no position", "combined_loader is no list of positions"): loops(
        "state_dict", combined_loader=[{"epoch": 1}]
    ),
    Fault("a resumed run at batch -1 of the training data", "position in the training data is damaged"): (
        lambda content: content["CaptionDataModule"].update(batches_done=-1)
    ),
    Fault("moments of an optimizer of another shape", "exp_avg is torch.float32 (3,), its parameter is ("): optimizer(
        exp_avg=torch.zeros(3)
    ),
    Fault("a moment of an optimizer that is a text", "exp_avg_sq is 'x', no tensor"): optimizer(exp_avg_sq="x"),
    Fault("an optimizer without a moment", "state.0.exp_avg is missing"): without(
        "optimizer_states", 0, "state", 0, "exp_avg"
    ),
    Fault("an optimizer's learning rate that is a text", "param_groups.0.lr is 'x', no number"): lambda content: (
        content["optimizer_states"][0]["param_groups"][0].update(lr="x")
    ),
    Fault("a schedule that is at step `x`", "lr_schedulers.0.last_epoch is 'x', no int"): lambda content: content[
        "lr_schedulers"
    ][0].update(last_epoch="x"),
    Fault("a schedule with an entry of its own", "lr_schedulers.0.step is unknown"): lambda content: content[
        "lr_schedulers"
    ][0].update(step=3),
    Fault("a state of random numbers that is none", "random_state is no state of random numbers"): (
        lambda content: content["random_state"].update(cpu=torch.zeros(3, dtype=torch.uint8))
    ),
}


@faults(EDITED)
def test_an_edited_state_is_refused_and_replaces_nothing(workdir, capsys, fault, case):
    edit_checkpoint(LAST, case)
    files = {path: path.read_bytes() for path in (LAST, RUN / "config.yaml")}
    line = ends(capsys, fault, main, ["fit", "--ckpt_path", str(LAST), "--trainer.max_epochs", "2"])
    assert "another one" in line
    assert files == {path: path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stopping_reason": 99}, "callbacks.EarlyStopping: 99 is not a valid EarlyStoppingReason"),
        ({"best_score": 0.5}, "StopEarly.best_score is 0.5, no tensor"),
    ],
)
def test_a_state_of_early_stopping_that_lightning_would_fail_on_is_refused(workdir, changes, says):
    edit_checkpoint(LAST, callback("StopEarly", **changes))
    with pytest.raises(InputError, match=says):
        main(["fit", "--ckpt_path", str(LAST), "--trainer.max_epochs", "2"])


def test_a_position_that_is_a_tensor_is_refused(workdir):
    edit_checkpoint(LAST, lambda content: content.update(CaptionDataModule=torch.zeros(2)))
    with pytest.raises(InputError, match="position in the training data is damaged"):
        main(["fit", "--ckpt_path", str(LAST), "--trainer.max_epochs", "2"])


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "NAdam", "Adagrad", "Adafactor"])
def test_a_sound_state_is_taken_whatever_the_optimizer(tmp_path, monkeypatch, name):
    """The check knows no optimizer by name: it compares with what a step leaves behind."""
    from captioning.training.resumed_state import check_optimizer

    parameters = [torch.nn.Parameter(torch.ones(4, 5)), torch.nn.Parameter(torch.ones(7))]
    made = getattr(torch.optim, name)(parameters, lr=0.1)
    fresh = made.state_dict()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    made.step()
    check_optimizer(made, made.state_dict(), "optimizer_states.0")
    check_optimizer(made, fresh, "optimizer_states.0")
