"""What every run logs of its steps and its speed, and the runs of a sweep."""

import csv
import time
from pathlib import Path

import pytest
import torch
import yaml
from helpers_runs import tiny_config
from helpers_training import make_data, make_module, make_shapes, make_trainer
from pytorch_lightning.callbacks import Callback, LambdaCallback

from captioning.__main__ import main
from captioning.attention import AdditiveScore, HardAttention
from captioning.settings import read_config
from captioning.training import Throughput
from captioning.training.callbacks import TerminalReport

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return make_shapes(tmp_path_factory.mktemp("data"), train=6, val=3, test=1)


class NormsByHand(Callback):
    """Collects the gradient norm before clipping, computed by hand, and the logged one, of every step."""

    def __init__(self) -> None:
        self.pairs: list[tuple[float, float]] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        squares = [p.grad.double().square().sum() for p in pl_module.parameters() if p.grad is not None]
        self.by_hand = float(torch.stack(squares).sum().sqrt())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.pairs.append((float(trainer.callback_metrics["train/gradient_norm"]), self.by_hand))


@pytest.mark.parametrize(("clip", "fused"), [({}, False), ({"gradient_clip_val": 0.01}, True)])
def test_gradient_norm_is_that_before_clipping(shapes, tmp_path, clip, fused):
    norms = NormsByHand()
    module = make_module()
    module.optimizer = lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=fused)
    trainer = make_trainer(tmp_path, callbacks=[norms], max_epochs=1, **clip)
    trainer.fit(module, make_data(shapes))
    assert len(norms.pairs) > 1
    for logged, by_hand in norms.pairs:
        assert logged == pytest.approx(by_hand, rel=1e-5) and logged > 0.01


def test_learning_rate_is_that_of_the_step(shapes, tmp_path):
    module = make_module()
    module.optimizer = lambda groups: torch.optim.SGD(groups, lr=0.5)
    module.scheduler = lambda optimizer, steps: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    trainer = make_trainer(tmp_path, max_epochs=-1, max_steps=3)
    trainer.fit(module, make_data(shapes))
    assert float(trainer.callback_metrics["train/learning_rate"]) == pytest.approx(0.005)  # of the third


@pytest.mark.parametrize(("options", "expected"), [({"ramp": (0.0, 1.0)}, [n / 8 for n in range(8)]), ({}, [None] * 8)])
def test_attention_that_needs_it_gets_the_fraction_of_training_that_is_done(shapes, tmp_path, options, expected):
    attention, fractions = HardAttention(AdditiveScore(10), **options), []
    watch = LambdaCallback(on_train_batch_end=lambda *_: fractions.append(attention.progress))
    make_trainer(tmp_path, callbacks=[watch], max_epochs=2).fit(make_module(attention), make_data(shapes))
    assert fractions == expected


def test_an_epoch_of_few_batches_has_a_speed_too(shapes, tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[Throughput()], max_epochs=1, log_every_n_steps=10_000)
    trainer.fit(make_module(), make_data(shapes))
    assert float(trainer.callback_metrics["train/captions_per_second"]) > 0


def test_a_validation_inside_an_epoch_does_not_count_as_training(shapes, tmp_path):
    seconds, speeds = 1.5, []

    class Watch(Callback):
        def on_validation_epoch_start(self, trainer, pl_module) -> None:
            time.sleep(seconds)

        def on_train_batch_end(self, trainer, *_) -> None:
            speeds.append(float(trainer.callback_metrics["train/captions_per_second"]))

    trainer = make_trainer(tmp_path, callbacks=[Throughput(), Watch()], val_check_interval=0.5)
    trainer.fit(make_module(), make_data(shapes, batch_size=8))
    assert len(speeds) == 4 and min(speeds) > 8 / seconds


def test_the_line_of_an_epoch_has_no_metric_without_a_value(shapes, tmp_path, capsys):
    trainer = make_trainer(tmp_path, callbacks=[TerminalReport()])
    trainer.fit(make_module(lr=0), make_data(shapes))
    assert trainer.callback_metrics["val/pointing_accuracy"].isnan()  # no caption names an object
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch 1"))
    assert "val/nll" in line and "nan" not in line


def test_a_validation_without_training_is_reported(shapes, tmp_path, capsys):
    trainer = make_trainer(tmp_path, callbacks=[TerminalReport()])
    trainer.validate(make_module(), make_data(shapes), verbose=False)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch 1, step 0"))
    assert "val/nll" in line


def test_a_run_of_a_sweep_has_the_sweeps_seed_and_a_folder_that_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tiny_config(tmp_path / "shapes", train=2, val=1, test=1) | {"seed_everything": 1}
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    main(["fit", "--seed_everything=2", "--config=tiny.yaml", "--runs=sweep"])
    assert yaml.safe_load(Path("sweep/tiny_2/config.yaml").read_text())["seed_everything"] == 2
    with Path("sweep/tiny_2/metrics/version_0/metrics.csv").open() as file:
        columns = set(next(csv.reader(file)))
    wanted = {"train/gradient_norm", "train/learning_rate", "train/captions_per_second"}
    assert wanted <= columns
    sweep = read_config(ROOT / "configs/sweeps/soft_hard.yaml")  # the one that is shipped; wandb reads it
    assert sweep["method"] == "grid" and "fit" in sweep["command"]
    assert all((ROOT / config).is_file() for config in sweep["parameters"]["config"]["values"])
