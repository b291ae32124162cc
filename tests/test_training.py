"""Training through Lightning on a handful of shapes."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers_training import make_data, make_module, make_shapes, make_trainer
from matplotlib.figure import Figure
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger

from captioning.attention import AdditiveScore, HardAttention
from captioning.data.shapes import ShapesSource
from captioning.errors import InputError
from captioning.model import SummedOutput
from captioning.objective import Likelihood
from captioning.training import Throughput, Unfreeze, ValidationFigures, WarmupCosine
from captioning.training.callbacks import BestCheckpoint, ResumableEarlyStopping


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> ShapesSource:
    return make_shapes(tmp_path_factory.mktemp("data"), train=10, val=4, test=3)


def test_an_epoch_of_fewer_batches_than_the_logging_interval_has_its_curve(shapes, tmp_path):
    logger = CSVLogger(tmp_path, name="", version="")
    trainer = make_trainer(tmp_path, log_every_n_steps=50, limit_train_batches=2, logger=logger)
    trainer.fit(make_module(), make_data(shapes))
    assert "train/loss" in (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")


def test_fit_logs_the_fixed_keys(shapes, tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[Throughput()])
    trainer.fit(make_module(), make_data(shapes))
    logged = trainer.logged_metrics
    keys = "loss nll attention_penalty attention_entropy captions_per_second gradient_norm"
    for key in f"{keys} learning_rate step_kl max_alpha beta".split():
        assert f"train/{key}" in logged
    for key in ("nll", "bleu1", "bleu2", "bleu3", "bleu4", "rouge_l", "cider_d", "reference_pointing_accuracy"):
        assert f"val/{key}" in logged
    torch.testing.assert_close(
        logged["train/loss"], logged["train/nll"] + logged["train/attention_penalty"], rtol=1e-5, atol=1e-6
    )


def test_checkpoint_holds_all_that_rebuilds_the_captioner_and_runs_no_code(shapes, tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.fit(make_module(), make_data(shapes))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["captioning"]
    model = {"encoder", "decoder", "preprocessing", "vocabulary", "tokenizer"}
    assert model <= set(saved)
    assert saved["decoder"]["init_args"]["attention"]["class_path"].endswith("SoftAttention")


def test_checkpoint_of_another_vocabulary_is_refused(shapes, tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.fit(make_module(), make_data(shapes))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(InputError, match="the checkpoint's vocabulary"):
        make_trainer(tmp_path).fit(
            make_module(), make_data(shapes, max_words=5), ckpt_path=tmp_path / "x.ckpt", weights_only=True
        )


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        pytest.param({"max_epochs": 3}, 21, marks=pytest.mark.slow),
        ({"max_epochs": 3, "accumulate_grad_batches": 2}, 12),
        ({"max_epochs": 3, "limit_train_batches": 5}, 15),
        ({"max_epochs": -1, "max_steps": 4}, 4),
    ],
)
def test_a_schedule_knows_the_steps_of_the_run(shapes, tmp_path, options, steps):
    totals = []

    def schedule(optimizer, total):
        totals.append(total)
        return WarmupCosine(optimizer, total, 2)

    trainer = make_trainer(tmp_path, limit_val_batches=0, **options)
    trainer.fit(make_module(scheduler=schedule), make_data(shapes))
    assert totals == [steps] == [trainer.global_step]


def test_a_schedule_needs_an_end(shapes, tmp_path):
    module = make_module(scheduler=lambda optimizer, steps: WarmupCosine(optimizer, steps, 2))
    with pytest.raises(InputError, match=r"rate or attention needs --trainer\.max_epochs or max_steps"):
        make_trainer(tmp_path, max_epochs=-1).fit(module, make_data(shapes))


def test_bleu_is_scored_against_words_the_vocabulary_lacks(shapes, tmp_path):
    """With a vocabulary of one word, references keep their words: nothing a model says can match <unk>."""
    module, data = make_module(), make_data(shapes, max_words=1)
    make_trainer(tmp_path).fit(module, data)
    assert len(data.vocabulary) == 5
    references = {
        word for image in module.evaluator.captioned_images for words in image.reference_words for word in words
    }
    assert len(references) > 5
    assert {word for image in module.evaluator.captioned_images for word in image.words} <= set(data.vocabulary.words)


def test_overfits_a_handful_of_images(shapes, tmp_path):
    module = make_module(hidden_dim=48, dropout=0.0, lr=2e-2, objective=Likelihood(attention_penalty=0.0))
    trainer = make_trainer(tmp_path, max_epochs=60, limit_val_batches=0)
    trainer.fit(module, make_data(shapes, batch_size=10, limit_images=2))
    assert float(trainer.callback_metrics["train/nll"]) < 0.5  # log V is about 3.5


@pytest.mark.slow
def test_unfreeze_waits_for_its_epoch(shapes, tmp_path):
    module, data = make_module(), make_data(shapes)
    before = [p.detach().clone() for p in module.encoder.parameters()]
    make_trainer(tmp_path, callbacks=[Unfreeze(1)]).fit(module, data)
    assert all(torch.equal(a, b) for a, b in zip(before, module.encoder.parameters(), strict=True))
    make_trainer(tmp_path, callbacks=[Unfreeze(0)]).fit(module, data)
    assert any(not torch.equal(a, b) for a, b in zip(before, module.encoder.parameters(), strict=True))


SETTINGS = {"settings": {"init_from": "first.ckpt"}}
IN_PYTHON = {"initial_model": SimpleNamespace(load_into=lambda captioner, vocabulary: None)}


@pytest.mark.parametrize(
    ("frozen", "start", "kept"),
    [(True, SETTINGS, True), (True, IN_PYTHON, True), (True, {}, False), (False, SETTINGS, False)],
)
def test_weights_of_another_model_keep_the_statistics_of_a_frozen_encoder(shapes, tmp_path, frozen, start, kept):
    """A few photos have other statistics: channels that are 0 in all of them would be divided by almost 0."""
    module = make_module(standardize=True, **start)
    module.encoder.set_trainable(not frozen)
    make_trainer(tmp_path, max_epochs=2).fit(module, make_data(shapes))  # a validation lies between
    assert torch.equal(module.captioner.decoder.feature_norm.running_mean, torch.zeros(12)) == kept


def test_samples_are_the_first_validation_images_with_their_evidence(shapes, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "captioning.training.loggers.attention_figure",
        lambda photo, words, models, **options: drawn.append((photo, words, models[""])) or Figure(),
    )
    module = make_module(output=SummedOutput())
    make_trainer(tmp_path, callbacks=[ValidationFigures(2)]).fit(module, make_data(shapes))
    first = shapes.index("val").image_ids[:2].tolist()
    assert sorted(p.name for p in (tmp_path / "figures").iterdir()) == [f"{i}_001.png" for i in first]
    assert [words for _, words, _ in drawn] == [image.words for image in module.evaluator.captioned_images[:2]]
    for photo, words, attention in drawn:
        assert attention.trace.evidence.shape == attention.trace.alphas.shape == (len(words), 36)
        torch.testing.assert_close(attention.trace.evidence.sum(1), torch.ones(len(words)))
        assert (photo.size, attention.view_box) == ((48, 48), (0, 0, 1, 1))


@pytest.mark.parametrize(
    ("order", "options"),
    [
        (2, {"gradient_clip_val": 0.01}),
        (math.inf, {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value", "precision": "bf16-mixed"}),
    ],
)
def test_gradients_are_clipped_with_a_fused_optimizer_too(shapes, tmp_path, order, options):
    norms = []

    class Recorder(torch.optim.AdamW):
        def step(self, closure=None):
            loss = closure()
            gradients = [p.grad.flatten() for group in self.param_groups for p in group["params"] if p.grad is not None]
            norms.append(float(torch.cat(gradients).norm(order)))
            return loss

    module = make_module()
    module.optimizer = lambda parameters: Recorder(parameters, lr=1e-3, fused=True)
    make_trainer(tmp_path, max_steps=2, **options).fit(module, make_data(shapes))
    assert norms == [pytest.approx(options["gradient_clip_val"], rel=0.01)] * 2


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 1.0}])
def test_training_that_diverges_ends_before_a_weight_changes(shapes, tmp_path, options):
    class Poison(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
            if trainer.global_step == 2:
                next(p for p in module.parameters() if p.grad is not None).grad.mul_(math.nan)

    module = make_module()
    with pytest.raises(InputError, match="training has diverged: the gradient is not finite at step 3; try a lower"):
        make_trainer(tmp_path, callbacks=[Poison()], **options).fit(module, make_data(shapes))
    assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_ramp_moves_with_every_batch_of_a_training_also_resumed(shapes, tmp_path):
    class Probabilities(pl.Callback):
        def on_train_batch_end(self, trainer, module, *_: Any) -> None:
            probabilities.append(float(trainer.callback_metrics["train/sample_probability"]))
            trainer.should_stop = len(probabilities) == 4

    def fit(**resume: Any) -> pl.Trainer:
        options = {"max_epochs": 2, "limit_train_batches": 5, "accumulate_grad_batches": 2, "limit_val_batches": 0}
        trainer = make_trainer(tmp_path, callbacks=[Probabilities()], **options)
        module = make_module(HardAttention(AdditiveScore(10), ramp=(0.5, 1)))
        trainer.fit(module, make_data(shapes), **resume)
        return trainer

    probabilities: list[float] = []
    fit().save_checkpoint(tmp_path / "x.ckpt")
    fit(ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    assert probabilities == pytest.approx([0, 0, 0, 0, 0, 0, 0.1, 0.2, 0.3, 0.4])


def test_a_ramp_needs_the_length_of_training(shapes, tmp_path):
    module = make_module(HardAttention(AdditiveScore(10), ramp=(0.5, 1)))
    with pytest.raises(InputError, match=r"rate or attention needs --trainer\.max_epochs or max_steps"):
        make_trainer(tmp_path, max_epochs=-1).fit(module, make_data(shapes))


def test_of_equally_good_checkpoints_that_of_the_lowest_nll_is_kept_and_ends_the_wait_of_early_stopping(tmp_path):
    stopping = EarlyStopping("val/bleu4", mode="max")
    strategy = SimpleNamespace(reduce_boolean_decision=bool)

    def is_kept(best: BestCheckpoint, bleu4: float, nll: float) -> bool:
        metrics, stopping.wait_count = {"val/nll": torch.tensor(nll)}, 1
        trainer = SimpleNamespace(callback_metrics=metrics, strategy=strategy, early_stopping_callbacks=[stopping])
        current = torch.tensor(bleu4)
        if kept := best.check_monitor_top_k(trainer, current):
            best.best_k_models, best.kth_best_model_path, best.best_model_score = {"x": current}, "x", current
        return kept

    best = BestCheckpoint(tmp_path, monitor="val/bleu4", mode="max")
    assert best.state_key == ModelCheckpoint(monitor="val/bleu4", mode="max").state_key  # in checkpoints of 0.2
    assert ResumableEarlyStopping("val/bleu4").state_key == EarlyStopping("val/bleu4").state_key  # as well
    assert [is_kept(best, 0.0, nll) for nll in (4.0, 3.0, 3.5)] == [True, True, False] and stopping.wait_count == 1
    assert is_kept(best, 0.0, 2.5) and stopping.wait_count == 0
    assert is_kept(best, 1.0, 5.0)  # BLEU comes first
    assert not is_kept(best, 0.5, 1.0) and not is_kept(best, math.nan, 1.0)
    resumed = BestCheckpoint(tmp_path, monitor="val/bleu4", mode="max")
    resumed.load_state_dict(best.state_dict())
    assert not is_kept(resumed, 1.0, 5.5) and is_kept(resumed, 1.0, 4.5)
