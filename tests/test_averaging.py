"""Averaged weights: what is validated, saved, captioned with; and training goes on as if nobody had looked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from captioning.cli.fit import main
from helpers_runs import tiny_config
from helpers_training import last_checkpoint, make_data, make_module, make_shapes, make_trainer, run_stage
from pytorch_lightning.callbacks import ModelCheckpoint

from captioning.attention import AdditiveScore, HardAttention
from captioning.data.shapes import ShapesSource
from captioning.errors import InputError
from captioning.inference import load
from captioning.training import CaptioningModule, CaptionSamples, WeightAverage

STEPS = 7  # an epoch
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> ShapesSource:
    return make_shapes(tmp_path_factory.mktemp("data"), train=10, val=4, test=3)


def state_of(module: CaptioningModule) -> Weights:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


class Diary(pl.Callback):
    """The module's weights after every step, and when a validation evaluated with them."""

    def __init__(self) -> None:
        self.trained: list[Weights] = []
        self.validated: list[Weights] = []

    def on_train_batch_end(self, trainer, module, *_: Any) -> None:
        self.trained.append(state_of(module))

    def on_validation_batch_start(self, trainer, module, *_: Any) -> None:
        self.validated.append(state_of(module))


def standardizing_module() -> CaptioningModule:
    return make_module(HardAttention(AdditiveScore(10)), standardize=True)


def fit(shapes, folder: Path, *callbacks: pl.Callback, average: bool = True, epochs: int = 2, **options: Any):
    module, diary = standardizing_module(), Diary()
    own = [WeightAverage(0.8)] if average else []
    trainer = make_trainer(folder, max_epochs=epochs, callbacks=[*own, diary, *callbacks], **checkpoints(callbacks))
    torch.manual_seed(3)
    run_stage(trainer.fit, module, make_data(shapes), **options)
    return module, diary


def checkpoints(callbacks) -> dict[str, bool]:
    return {"enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks)}


def average_by_hand(trained: list[Weights], buffers: set[str], decay: float = 0.8) -> Weights:
    """Of parameters; buffers are those of the last step."""
    average = dict(trained[0])
    for n, weights in enumerate(trained[1:], start=1):
        d = min(decay, (1 + n) / (10 + n))
        for name, value in weights.items():
            average[name] = value if name in buffers else d * average[name].double() + (1 - d) * value.double()
    return average


def assert_close(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-5, atol=1e-7, msg=name, equal_nan=True)


def assert_equal(found: Weights, expected: Weights) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name, equal_nan=True)


def test_validations_and_checkpoints_use_the_average_and_training_does_not_notice(shapes, tmp_path):
    module, diary = fit(shapes, tmp_path, last_checkpoint(tmp_path))
    plain, undisturbed = fit(shapes, tmp_path / "plain", average=False)
    assert len(diary.trained) == 2 * STEPS
    for found, expected in zip(diary.trained, undisturbed.trained, strict=True):
        assert_equal(found, expected)
    buffers = {name for name, _ in module.named_buffers()}
    averages = [average_by_hand(diary.trained[:STEPS], buffers), average_by_hand(diary.trained, buffers)]
    for found, expected in zip(diary.validated, averages, strict=True):
        assert_close(found, expected)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert_equal(checkpoint["state_dict"], diary.validated[-1])
    current = checkpoint["state_dict"] | checkpoint["current_model_state"]
    assert_equal(current, diary.trained[-1])
    assert not buffers & set(checkpoint["current_model_state"])  # what both have alike is there once
    assert_equal(state_of(module), checkpoint["state_dict"])  # after training
    name = "captioner.decoder.standardize.running_mean"
    assert float(state_of(plain)[name].abs().sum()) > 0
    assert_equal({name: checkpoint["state_dict"][name]}, {name: diary.trained[-1][name]})
    differs = "captioner.decoder.output.L_o.weight"
    assert not torch.allclose(checkpoint["state_dict"][differs], diary.trained[-1][differs], rtol=1e-3)


def test_a_checkpoint_captions_with_the_average(shapes, tmp_path):
    module, _ = fit(shapes, tmp_path, last_checkpoint(tmp_path))
    loaded = load(tmp_path / "last.ckpt").model.state_dict()
    assert_equal({f"captioner.{name}": value for name, value in loaded.items()}, {
        name: value for name, value in state_of(module).items() if name.startswith("captioner.")
    })  # fmt: skip


class Stop(pl.Callback):
    """Raises at some point of the first epoch or its validation."""

    def __init__(self, hook: str, step: int) -> None:
        self.step = step
        setattr(self, hook, self.stop)

    def stop(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            raise KeyError("a crash")


@pytest.mark.parametrize(("hook", "step"), [("on_train_batch_end", 3), ("on_validation_batch_end", STEPS)])
def test_a_run_that_is_interrupted_in_training_or_in_validation_resumes_exactly(shapes, tmp_path, hook, step):
    with pytest.raises(KeyError):
        fit(shapes, tmp_path, last_checkpoint(tmp_path, save_on_exception=True), Stop(hook, step))
    last, path = last_checkpoint(tmp_path), tmp_path / "last.ckpt"
    resumed, diary = fit(shapes, tmp_path, last, ckpt_path=path, weights_only=True)
    whole, expected = fit(shapes, tmp_path / "whole")
    for found, other in zip(diary.trained, expected.trained[step:], strict=True):
        assert_equal(found, other)
    assert_equal(state_of(resumed), state_of(whole))


def test_a_checkpoint_saved_after_training_resumes_exactly(shapes, tmp_path):
    first, trainer = standardizing_module(), make_trainer(tmp_path, callbacks=[WeightAverage(0.8)])
    torch.manual_seed(3)
    run_stage(trainer.fit, first, make_data(shapes))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    resumed, diary = fit(shapes, tmp_path, ckpt_path=tmp_path / "after.ckpt", weights_only=True)
    whole, expected = fit(shapes, tmp_path / "whole")
    assert_equal(diary.trained[-1], expected.trained[-1])
    assert_equal(state_of(resumed), state_of(whole))


@pytest.mark.parametrize("first", [True, False])
def test_sample_captions_are_of_the_average_wherever_the_callback_stands(shapes, tmp_path, monkeypatch, first):
    seen = []
    make = CaptioningModule._make_evaluator

    def noting(module):
        seen.append(state_of(module))
        return make(module)

    monkeypatch.setattr(CaptioningModule, "_make_evaluator", noting)
    module = standardizing_module()
    callbacks = [CaptionSamples(1), WeightAverage(0.8)]
    trainer = make_trainer(tmp_path, callbacks=callbacks[::-1] if first else callbacks)
    run_stage(trainer.fit, module, make_data(shapes))
    of_validation, of_samples = seen
    assert_equal(of_samples, of_validation)
    assert_equal(state_of(module), of_validation)


def test_the_data_are_not_copied_with_the_weights(shapes, tmp_path):
    module, data, average = make_module(), make_data(shapes), WeightAverage()
    module.connect(data)
    make_trainer(tmp_path, callbacks=[average]).fit(module, datamodule=data)
    assert average._average_model.module.data is data


def test_a_decay_out_of_range_is_refused():
    with pytest.raises(InputError, match=r"decay must be at least 0 and below 1, got 1\.5"):
        WeightAverage(1.5)


# The command line


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("sys.argv", ["captioning"])
        config = tiny_config(folder / "shapes", val=3)
        config["trainer"]["callbacks"] = [{"class_path": "captioning.training.Throughput"}]
        Path("tiny.yaml").write_text(yaml.safe_dump(config))
        yield folder


def test_the_overlay_adds_the_average_to_a_run_that_resumes_by_its_checkpoint_alone(workdir):
    overlay = str(Path(__file__).parent.parent / "configs/overlays/ema.yaml")
    main(["fit", "--config", "tiny.yaml", "--config", overlay])
    callbacks = yaml.safe_load(Path("runs/tiny/config.yaml").read_text())["trainer"]["callbacks"]
    assert [callback["class_path"].rpartition(".")[2] for callback in callbacks] == ["Throughput", "WeightAverage"]
    last = Path("runs/tiny/checkpoints/last.ckpt")
    cli = main(["fit", "--ckpt_path", str(last), "--trainer.max_epochs", "2"])
    assert any(isinstance(callback, WeightAverage) for callback in cli.trainer.callbacks)
    checkpoint = torch.load(last, weights_only=True)
    assert checkpoint["averaging_state"]["n_averaged"] == checkpoint["global_step"] == cli.trainer.global_step
    best = Path("runs/tiny/checkpoints/best.ckpt")
    assert "current_model_state" in torch.load(best, weights_only=True)
    main(["test", "--ckpt_path", str(best)])
    captions = json.loads(Path("runs/tiny/test_captions.json").read_text())
    image = sorted(Path("shapes").rglob("test*/*.png"))[0]
    assert captions[0]["caption"] == load(best).caption(image, beam_size=1).text
    main(["test", "--config", "runs/tiny/config.yaml", "--ckpt_path", str(best)])  # with the callback, and no warning
