"""Hard attention through training, evaluation, checkpoints and the public API, on a handful of shapes."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from helpers_training import make_data, make_module, make_shapes, make_trainer, run_stage
from PIL import Image

from captioning.attention import (
    AdditiveScore,
    Entmax15,
    GumbelAttention,
    HardAttention,
    SoftAttention,
    Sparsemax,
)
from captioning.checkpoint.load import SavedModel
from captioning.data.shapes import ShapesSource
from captioning.errors import InputError
from captioning.evaluation.records import read_metrics
from captioning.inference import load
from captioning.model import SummedOutput
from captioning.model.captioner import Captioner
from captioning.objective import Likelihood
from captioning.objective.collapse import PATIENCE, attention_statistics
from captioning.objective.estimators import ArgmaxBaseline, LeaveOneOut, MovingAverage, RewardToGo
from captioning.trace import EXPECTATION, AttentionTrace
from captioning.training.module import CaptioningModule


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> ShapesSource:
    return make_shapes(tmp_path_factory.mktemp("data"), train=6, val=2, test=3)


def hard_module(**options) -> CaptioningModule:
    return make_module(HardAttention(AdditiveScore(10)), **options)


def quick_trainer(folder: Path, **options) -> pl.Trainer:
    return make_trainer(folder, **{"limit_val_batches": 0} | options)


@pytest.fixture(scope="module")
def trained(shapes, tmp_path_factory) -> Path:
    """The checkpoint of a short run with hard attention."""
    folder = tmp_path_factory.mktemp("run")
    trainer = quick_trainer(folder, max_epochs=2)
    run_stage(trainer.fit, hard_module(), make_data(shapes))
    trainer.save_checkpoint(folder / "x.ckpt")
    return folder / "x.ckpt"


@pytest.mark.parametrize(
    ("attention", "estimator", "keys"),
    [
        (HardAttention, None, {"reward", "baseline", "advantage_std", "sample_probability"}),
        (HardAttention, RewardToGo, {"reward", "baseline", "advantage_std", "sample_probability"}),
        (HardAttention, LeaveOneOut, {"reward", "baseline", "advantage_std", "sample_probability"}),
        (HardAttention, ArgmaxBaseline, {"reward", "baseline", "advantage_std", "sample_probability"}),
        (GumbelAttention, None, {"temperature", "sample_probability"}),
        (SoftAttention, None, set()),
    ],
)
def test_fit_logs_the_fixed_keys(shapes, tmp_path, attention, estimator, keys):
    drawn = {"sample_probability": 1.0} if attention is HardAttention else {}  # without draws there is no reward
    module = make_module(
        attention(AdditiveScore(10), **drawn), objective=Likelihood(estimator=estimator() if estimator else None)
    )
    trainer = quick_trainer(tmp_path, max_steps=2)
    run_stage(trainer.fit, module, make_data(shapes))
    logged = {name.removeprefix("train/"): float(v) for name, v in trainer.logged_metrics.items() if "train/" in name}
    always = {"loss", "nll", "attention_penalty", "attention_entropy", "max_alpha", "step_kl", "beta"}
    always |= {"gradient_norm", "learning_rate"}
    assert set(logged) == always | keys
    assert all(math.isfinite(value) for value in logged.values()), logged
    expected = logged["nll"] + logged["attention_penalty"]
    if attention is not SoftAttention:
        expected -= 0.002 * logged["attention_entropy"]
    assert logged["loss"] == pytest.approx(expected, rel=1e-5)  # REINFORCE's value means nothing and is left out


@pytest.mark.parametrize("selection", [SoftAttention, HardAttention])
@pytest.mark.parametrize("normaliser", [Sparsemax, Entmax15])
def test_sparse_alphas_are_trained_and_log_the_size_of_their_support(shapes, tmp_path, selection, normaliser):
    attention = selection(AdditiveScore(10), normaliser=normaliser())
    module = make_module(attention, SummedOutput() if selection is SoftAttention else None)
    trainer = quick_trainer(tmp_path, max_steps=3)
    run_stage(trainer.fit, module, make_data(shapes))
    logged = {name: float(value) for name, value in trainer.logged_metrics.items() if "train/" in name}
    assert all(math.isfinite(value) for value in logged.values()), logged
    assert 1 <= logged["train/support_size"] <= module.captioner.encoder.grid_size[0] ** 2
    assert all(parameter.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_summed_output_is_trained_resumed_and_tested(shapes, tmp_path, precision):
    """With label smoothing and two samples; a run that is resumed ends with the same weights."""

    def make() -> CaptioningModule:
        objective = Likelihood(label_smoothing=0.1, samples=2)
        return make_module(SoftAttention(AdditiveScore(10)), SummedOutput(block=(2, 2)), objective=objective)

    whole = make()
    run_stage(quick_trainer(tmp_path / "whole", max_epochs=2, precision=precision).fit, whole, make_data(shapes))
    trainer = quick_trainer(tmp_path / "part", max_epochs=1, precision=precision)
    run_stage(trainer.fit, make(), make_data(shapes))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    rest = make()
    torch.manual_seed(99)
    trainer = quick_trainer(tmp_path / "rest", max_epochs=2, precision=precision)
    run_stage(trainer.fit, rest, make_data(shapes), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    for (name, one), other in zip(whole.state_dict().items(), rest.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    tester = quick_trainer(tmp_path / "test", precision=precision)
    run_stage(tester.test, rest, make_data(shapes), verbose=False)
    scores, _ = read_metrics(tmp_path / "test" / "test_metrics.json")
    for measure in ("pointing_accuracy", "attention_correctness"):
        assert {f"reference_{measure}", f"reference_posterior_{measure}"} <= scores.keys()
    assert math.isfinite(scores["nll"])


def test_hard_attention_has_the_papers_baseline_by_default():
    estimator = hard_module().objective.estimator
    assert isinstance(estimator, MovingAverage) and (estimator.decay, estimator.per_word) == (0.9, False)


def test_nothing_is_estimated_before_draws_begin_but_all_samples_are_decoded(shapes, tmp_path, monkeypatch):
    module = make_module(HardAttention(AdditiveScore(10), ramp=(2, 3)), objective=Likelihood(estimator=LeaveOneOut(3)))
    rows, teach = [], Captioner.teacher_force

    def counted(self, batch, memory, samples=1):
        rows.append(samples)
        return teach(self, batch, memory, samples)

    monkeypatch.setattr(Captioner, "teacher_force", counted)
    trainer = quick_trainer(tmp_path, max_steps=2)
    run_stage(trainer.fit, module, make_data(shapes))
    assert "train/nll" in trainer.logged_metrics and "train/reward" not in trainer.logged_metrics
    trainer = quick_trainer(tmp_path, max_steps=3)
    run_stage(trainer.fit, module, make_data(shapes))
    assert float(trainer.logged_metrics["train/sample_probability"]) == 0.5
    assert rows == [3] * 5


@pytest.mark.parametrize("attention", [SoftAttention, GumbelAttention])
def test_an_estimator_is_refused_by_attention_that_needs_none(attention):
    with pytest.raises(InputError, match=f"estimator: {attention.__name__} is differentiable and needs no estimator"):
        make_module(attention(AdditiveScore(10)), objective=Likelihood(estimator=LeaveOneOut(2)))


@pytest.mark.parametrize("option", [{"reward_weight": 0.5}, {"entropy_weight": 0.1}])
def test_a_weight_without_effect_is_refused(option):
    with pytest.raises(InputError, match=f"{next(iter(option))}: has no effect with SoftAttention"):
        make_module(SoftAttention(AdditiveScore(10)), objective=Likelihood(**option))


@pytest.mark.parametrize("estimator", [MovingAverage, RewardToGo])
def test_resumed_run_ends_with_the_same_weights_and_baselines(shapes, tmp_path, estimator):
    """Draws, baselines and the schedule all continue from the checkpoint."""

    def make() -> CaptioningModule:
        return make_module(HardAttention(AdditiveScore(10), ramp=(0, 6)), objective=Likelihood(estimator=estimator()))

    whole = make()
    run_stage(quick_trainer(tmp_path, max_epochs=-1, max_steps=7).fit, whole, make_data(shapes))
    trainer = quick_trainer(tmp_path, max_epochs=-1, max_steps=5)
    run_stage(trainer.fit, make(), make_data(shapes))
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    resumed = make()
    torch.manual_seed(99)
    trainer = quick_trainer(tmp_path, max_epochs=-1, max_steps=7)
    run_stage(trainer.fit, resumed, make_data(shapes), ckpt_path=tmp_path / "stopped.ckpt", weights_only=True)
    state = resumed.state_dict()
    assert "captioner.decoder.attention.batches" in state and any(".estimator.average" in name for name in state)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0, equal_nan=True, msg=name)


def test_test_reports_the_mode_and_the_bounds_beside_the_nll_of_the_expected_context(shapes, tmp_path, trained):
    nlls = set()
    for mode in ("expected", "argmax", "sample"):
        module = make_module(HardAttention(AdditiveScore(10), inference=mode), bound_samples=5)
        trainer = quick_trainer(tmp_path)
        run_stage(trainer.test, module, make_data(shapes), ckpt_path=trained, verbose=False, weights_only=True)
        written = json.loads((tmp_path / "test_metrics.json").read_text())
        assert (written["search"]["inference"], written["search"]["bound_samples"]) == (mode, 5)
        assert written["test/bound"] < written["test/iwae_bound"] < 0 < written["test/nll"]
        assert written["test/iwae_bound"] == pytest.approx(-written["test/nll"], abs=0.2)
        nlls.add(written["test/nll"])
    assert len(nlls) == 1
    module = make_module(HardAttention(AdditiveScore(10)), bound_samples=0)
    options = {"ckpt_path": trained, "verbose": False, "weights_only": True}
    (scores,) = run_stage(quick_trainer(tmp_path).test, module, make_data(shapes), **options)
    assert "test/bound" not in scores


def test_bounds_are_left_out_while_training_and_for_deterministic_attention(shapes, tmp_path):
    trainer = quick_trainer(tmp_path, limit_train_batches=1, limit_val_batches=1)
    run_stage(trainer.fit, hard_module(), make_data(shapes))
    assert "val/nll" in trainer.callback_metrics and "val/bound" not in trainer.callback_metrics
    module = make_module(SoftAttention(AdditiveScore(10)))
    module.assemble(make_module_vocabulary(shapes))
    (scores,) = run_stage(quick_trainer(tmp_path).test, module, make_data(shapes), verbose=False)
    assert "test/nll" in scores and "test/bound" not in scores


def make_module_vocabulary(shapes: ShapesSource):
    data = make_data(shapes)
    data.prepare_data()
    data.setup("fit")
    return data.vocabulary


def test_the_api_forms_contexts_as_the_mode_says(trained):
    captioner = load(trained)
    image = Image.effect_noise((60, 50), 90).convert("RGB")
    assert (captioner.caption(image).trace.locations == EXPECTATION).all()
    sure = captioner.caption(image, inference="argmax")
    assert (sure.trace.locations == sure.alphas.argmax(1)).all()
    first, second = (captioner.caption(image, inference="sample", seed=8) for _ in range(2))
    assert (first.trace.locations == second.trace.locations).all() and (first.trace.locations >= 0).all()
    assert captioner.model.decoder.attention.inference == "expected"
    with pytest.raises(InputError, match="seed=1 has an effect only when sampling"):
        captioner.caption(image, inference="argmax", seed=1)


def test_a_run_with_collapsed_attention_warns_once_an_epoch(shapes, tmp_path, monkeypatch):
    monkeypatch.setattr("captioning.objective.collapse.PATIENCE", 2)
    trainer = quick_trainer(tmp_path, max_epochs=2, limit_train_batches=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_stage(trainer.fit, hard_module(), make_data(shapes))
    messages = [str(w.message) for w in caught if "attention has collapsed" in str(w.message)]
    assert len(messages) == 2 and "uniform" in messages[0]  # a model that has learned nothing looks everywhere


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        (SoftAttention, set()),
        (GumbelAttention, {"entropy_weight", "ramp"}),
        (HardAttention, {"entropy_weight", "ramp", "reward_weight"}),
    ],
)
def test_warning_of_collapse_names_only_options_that_the_attention_has(attention, options):
    module = make_module(attention(AdditiveScore(10)))
    uniform, exists = torch.full((1, 2, 4), 0.25), torch.ones(1, 2, dtype=torch.bool)
    for _ in range(PATIENCE):
        module._watch.update(attention_statistics(AttentionTrace(uniform, 0.5 * exists, None), exists), 4)
    with pytest.warns(UserWarning, match="attention has collapsed.*uniform") as warned:
        module.on_train_epoch_end()
    named = set(re.findall("`([a-z_]+)`", str(warned[0].message)))
    assert named == options | {"attention_penalty"}


@pytest.mark.parametrize("first", [HardAttention, SoftAttention])
def test_a_second_stage_counts_its_training_batches_from_the_start(shapes, tmp_path, first):
    """By which hard attention draws: one that went on counting would begin where its ramp has ended."""
    before, after = make_module(first(AdditiveScore(10))), make_module(HardAttention(AdditiveScore(10)), lr=0.0)
    run_stage(quick_trainer(tmp_path, limit_train_batches=3).fit, before, make_data(shapes))
    learned = {name: value.clone() for name, value in before.captioner.named_parameters()}
    after.start = SavedModel("first.ckpt", before.captioner, before.vocabulary, {})
    run_stage(quick_trainer(tmp_path, limit_train_batches=1).fit, after, make_data(shapes))
    assert int(after.attention.batches) == 1
    assert all(torch.equal(after.captioner.state_dict()[name], value) for name, value in learned.items())
