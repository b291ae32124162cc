"""The plan of a run: folder, checkpoint, monitors and loggers, before any of its objects exists."""

from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.loggers.logger import DummyLogger

from captioning.errors import InputError
from captioning.training.plan import RunPlan, plan_run

TRAINER = ["overfit_batches", "precision", "accumulate_grad_batches", "check_val_every_n_epoch", "gradient_clip_val"]
TRAINER += ["logger"]
CSV = "pytorch_lightning.loggers.CSVLogger"
ATTENTION = {"class_path": "captioning.attention.SoftAttention"}


def plan(*given: str, folder: str | None = None, **config: Any) -> RunPlan:
    """Plan a run of runs/soft.yaml; a part of ``config`` completes the default part."""
    parts = {"trainer": dict.fromkeys(TRAINER), "early_stopping": {"monitor": "val/bleu4", "mode": None}}
    parts["checkpoint"] = parts["early_stopping"] | {"save_top_k": 1, "filename": "best"}
    for name, part in parts.items():
        parts[name] = part | config.pop(name, {})
    defaults = {"config": ["configs/soft.yaml", "overlay.yaml"], "name": None, "runs": "runs", "ckpt_path": None}
    defaults |= {"seed_everything": 3, "init_from": None, "model": {"decoder": {"attention": ATTENTION}}}
    return plan_run(defaults | parts | config, given, folder)


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)


def touch(path: str) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).touch()
    return path


def test_a_run_has_the_name_of_its_first_configuration_and_planning_writes_nothing(tmp_path, monkeypatch):
    run_plan = plan()
    assert (run_plan.folder.path, run_plan.taken_folder) == (Path("runs/soft"), None)
    assert run_plan.claims_folder and run_plan.changes["ckpt_path"] is None
    assert run_plan.changes["checkpoint.dirpath"] == run_plan.changes["last.dirpath"] == "runs/soft/checkpoints"
    assert plan(name="").folder.path == Path("runs/soft")  # an unset variable of a shell
    assert plan(name="mine", runs="elsewhere").folder.path == Path("elsewhere/mine")
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    assert plan().folder.path == Path("runs/soft_3") and plan(name="mine").folder.path == Path("runs/mine")
    assert not list(tmp_path.iterdir())


def test_a_taken_name_gets_the_first_free_number(tmp_path):
    touch("runs/soft/config.yaml")
    touch("runs/soft-2/checkpoints/last.ckpt")
    Path("runs/soft-3").symlink_to("nowhere")
    run_plan = plan()
    assert run_plan.folder.path == Path("runs/soft-4") and run_plan.taken_folder.path == Path("runs/soft")
    assert run_plan.changes["name"] == "soft-4" and run_plan.changes["trainer.default_root_dir"] == "runs/soft-4"
    second = plan(folder="runs/soft")  # another process of the run
    assert second.folder.path == Path("runs/soft") and not second.claims_folder


@pytest.mark.parametrize(("checkpoint", "file"), [("last", "last"), ("best", "best"), (None, "last")])
def test_a_resumed_run_keeps_its_folder(checkpoint, file):
    path = touch(f"runs/soft/checkpoints/{file}.ckpt")
    resumed = plan(ckpt_path=checkpoint or path)
    assert resumed.folder.path == Path("runs/soft") and not resumed.claims_folder
    assert resumed.changes["ckpt_path"] == path
    assert plan(ckpt_path=path, name="new").folder.path == Path("runs/new")


def test_a_mode_is_that_of_its_metric():
    assert plan(checkpoint={"monitor": "val/cider_d", "mode": "max"}).changes["checkpoint.mode"] == "max"
    with pytest.raises(InputError, match=r"^--checkpoint\.mode max: val/nll is best at its minimum; set it to min$"):
        plan(checkpoint={"monitor": "val/nll", "mode": "max"})
    assert plan(early_stopping={"monitor": "val/nll"}).changes["early_stopping.mode"] == "min"


def test_every_run_logs_to_csv_and_wandb_goes_on_with_a_resumed_run():
    wandb, csv = plan().changes["trainer.logger"]
    assert csv == {
        "class_path": CSV,
        "init_args": {"save_dir": "runs/soft", "name": "metrics", "version": None},
    }
    named = wandb["init_args"]
    assert (named["name"], named["group"], named["save_dir"]) == ("soft", "soft", "runs/soft") and named["id"]
    assert plan(trainer={"logger": False}).changes["trainer.logger"] == [csv]
    trainer = {"logger": [wandb | {"init_args": named | {"name": "other"}}, csv]}  # of a run's config.yaml
    new = plan(trainer=trainer).changes["trainer.logger"][0]["init_args"]
    assert new["name"] == "soft" and new["id"] != named["id"]
    own = {"class_path": wandb["class_path"], "init_args": {"name": "mine", "id": "abc"}}  # a user's list
    kept = plan(trainer={"logger": [own]}).changes["trainer.logger"][0]["init_args"]
    assert (kept["name"], kept["id"]) == ("mine", "abc")
    touch("runs/soft/checkpoints/last.ckpt")
    again = plan(trainer=trainer, ckpt_path="last").changes["trainer.logger"]
    assert again == [trainer["logger"][0] | {"init_args": named | {"name": "other"}}, csv]


class MyCSVLogger(DummyLogger):
    """A logger of the user's that does not take a folder."""

    def __init__(self, file: str) -> None:
        super().__init__()


def test_a_csv_logger_keeps_its_options_and_a_class_of_the_user_logs_beside_it():
    csv = {"class_path": CSV, "init_args": {"name": "logs", "version": 0, "flush_logs_every_n_steps": 1}}
    (changed,) = plan(trainer={"logger": csv}).changes["trainer.logger"]
    place = {"save_dir": "runs/soft", "name": "metrics", "version": None}
    assert changed["init_args"] == place | {"flush_logs_every_n_steps": 1}
    mine = {"class_path": f"{__name__}.MyCSVLogger", "init_args": {"file": "mine.csv"}}
    loggers = plan(trainer={"logger": [mine]}).changes["trainer.logger"]
    assert loggers == [mine, {"class_path": CSV, "init_args": place}]


def test_options_for_folders_are_refused_on_the_command_line():
    with pytest.raises(InputError, match=r"^--last\.dirpath: checkpoints and logs of a run are in RUNS/NAME"):
        plan("name", "runs", "last.dirpath")
