"""Training through Lightning on a handful of shapes."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from captioning.training.checkpoint_io import AtomicCheckpointIO
from helpers_training import make_data, make_module, make_shapes, make_trainer, run_stage
from matplotlib.figure import Figure
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import MixedPrecision

from captioning.attention import AdditiveScore, HardAttention
from captioning.data.shapes import ShapesSource
from captioning.errors import InputError
from captioning.evaluation.files import read_results
from captioning.model import SummedOutput
from captioning.objective import ArgmaxBaseline, Likelihood
from captioning.training import CaptionSamples, Throughput, Unfreeze
from captioning.training.module import CaptioningModule
from captioning.training.schedules import WarmupCosine


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> ShapesSource:
    return make_shapes(tmp_path_factory.mktemp("data"), train=10, val=4, test=3)


def weights(module: CaptioningModule) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_fit_logs_the_fixed_keys(shapes, tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[Throughput(every_n_steps=2)])
    run_stage(trainer.fit, make_module(), make_data(shapes))
    logged = trainer.logged_metrics
    for key in ("loss", "nll", "attention_penalty", "attention_entropy", "captions_per_second", "words_per_second"):
        assert f"train/{key}" in logged
    for key in ("nll", "bleu1", "bleu2", "bleu3", "bleu4"):
        assert f"val/{key}" in logged
    torch.testing.assert_close(
        logged["train/loss"], logged["train/nll"] + logged["train/attention_penalty"], rtol=1e-5, atol=1e-6
    )


class Crash(pl.Callback):
    """Raises in a hook once so many steps have been made."""

    def __init__(self, hook: str, steps: int) -> None:
        self.steps = steps
        setattr(self, hook, self.crash)

    def crash(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.steps:
            raise KeyError("a crash")


class Diary(pl.Callback):
    """The captions of every batch that was trained on, and when there was a validation."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.entries.append(batch.captions.tolist())

    def on_validation_end(self, trainer, module) -> None:
        self.entries.append("validation")


@pytest.mark.parametrize(
    ("hook", "steps", "saved", "limit", "scheduled", "num_workers"),
    [
        ("on_train_batch_end", 3, 3, 1.0, False, 0),  # inside the first epoch
        ("on_train_batch_end", 10, 7, 1.0, False, 0),  # saved at the end of the epoch before
        ("on_train_batch_end", 10, 7, 1.0, True, 0),
        ("on_train_batch_end", 10, 10, 1.0, False, 0),
        ("on_train_batch_end", 10, 10, 1.0, True, 1),
        ("on_before_backward", 10, 10, 1.0, False, 0),
        ("on_before_backward", 13, 13, 1.0, True, 1),
        ("on_train_epoch_start", 7, 7, 1.0, True, 0),
        ("on_train_batch_end", 10, 5, 5, True, 0),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(shapes, tmp_path, hook, steps, saved, limit, scheduled, num_workers):
    """7 steps an epoch, or 5, in three epochs."""
    scheduler = {"scheduler": lambda optimizer, steps: WarmupCosine(optimizer, steps, 2)} if scheduled else {}
    every_step = saved == steps

    def fit(*callbacks: pl.Callback, **options) -> tuple[CaptioningModule, list[Any]]:
        last = ModelCheckpoint(tmp_path, "last", save_on_exception=every_step, enable_version_counter=False)
        diary = Diary()
        module, data = make_module(**scheduler), make_data(shapes, num_workers=num_workers)
        trainer = make_trainer(
            tmp_path,
            max_epochs=3,
            enable_checkpointing=True,
            limit_train_batches=limit,
            callbacks=[last, diary, *callbacks],
        )
        torch.manual_seed(99 if options else 3)
        with pytest.raises(KeyError) if callbacks else nullcontext():
            run_stage(trainer.fit, module, data, **options)
        return module, diary.entries

    fit(Crash(hook, steps))
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == saved
    resume = {"ckpt_path": tmp_path / "last.ckpt", "weights_only": True}
    fit(Crash("on_train_start", saved), **resume)  # stops before its first batch: the checkpoint is as good as it was
    resumed, entries = fit(**resume)
    position = torch.load(tmp_path / "last.ckpt", weights_only=True)["CaptionDataModule"]
    assert (position["epoch"], position["batches_done"]) == (3, 0)  # not the one that it was resumed from
    whole, expected = fit()
    steps_of = [number for number, entry in enumerate(expected) if entry != "validation"]
    assert [entry for entry in entries if entry != "validation"] == [expected[n] for n in steps_of[saved:]]
    assert entries.count("validation") == expected[steps_of[saved] :].count("validation")
    if hook != "on_before_backward":  # else the step that was lost has drawn random numbers
        for name, value in weights(whole).items():
            torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=0, msg=name)


def test_checkpoint_holds_all_that_rebuilds_the_captioner_and_runs_no_code(shapes, tmp_path):
    module = make_module()
    trainer = make_trainer(tmp_path)
    run_stage(trainer.fit, module, make_data(shapes))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["captioning"]
    model = {"encoder", "decoder", "preprocessing", "vocabulary", "tokenizer"}
    assert set(saved) == {"format", "settings"} | model
    assert saved["decoder"]["init_args"]["attention"]["class_path"].endswith("SoftAttention")
    assert not list(tmp_path.glob("*.part"))


def test_checkpoint_of_another_vocabulary_is_refused(shapes, tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    run_stage(trainer.fit, make_module(), make_data(shapes))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(InputError, match="the checkpoint's vocabulary"):
        run_stage(
            make_trainer(tmp_path).validate,
            make_module(),
            make_data(shapes, max_words=5),
            ckpt_path=tmp_path / "x.ckpt",
            verbose=False,
        )


def test_a_schedule_needs_an_end(shapes, tmp_path):
    module = make_module(scheduler=lambda optimizer, steps: WarmupCosine(optimizer, steps, 2))
    with pytest.raises(InputError, match=r"model\.scheduler: needs the length of training; give --trainer\.max_epochs"):
        run_stage(make_trainer(tmp_path, max_epochs=-1).fit, module, make_data(shapes))


def test_test_writes_scores_and_every_caption(shapes, tmp_path):
    module, data = make_module(), make_data(shapes)
    trainer = make_trainer(tmp_path, limit_test_batches=None)
    run_stage(trainer.fit, module, data)
    (scores,) = run_stage(trainer.test, module, data, verbose=False)
    written = json.loads((tmp_path / "test_metrics.json").read_text())
    captions = json.loads((tmp_path / "test_captions.json").read_text())
    assert written["test/bleu1"] == pytest.approx(scores["test/bleu1"], abs=1e-4)
    assert (written["search"]["beam_size"], written["search"]["split"]) == (2, "test")
    index = shapes.index("test")
    assert [c["image_id"] for c in captions] == index.image_ids.tolist()
    assert captions[2]["references"] == index.references(2)


def test_predict_captions_every_image_of_the_test_split(shapes, tmp_path):
    module, data = make_module(), make_data(shapes)
    trainer = make_trainer(tmp_path)
    run_stage(trainer.fit, module, data)
    predictions = [p for batch in run_stage(trainer.predict, module, data) for p in batch]
    ids = shapes.index("test").image_ids.tolist()
    assert [image["image_id"] for image in predictions] == ids
    lines = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert [line["image_id"] for line in lines] == ids
    assert [line["caption"] for line in lines] == [image["caption"] for image in predictions]
    assert all(Path(line["image"]).is_file() for line in lines)
    assert read_results(tmp_path / "predict_results.json") == {line["image_id"]: line["caption"] for line in lines}


def test_bleu_is_scored_on_free_running_captions_against_words_the_vocabulary_lacks(shapes, tmp_path):
    """With a vocabulary of one word, references keep their words: nothing a model says can match <unk>."""
    module, data = make_module(), make_data(shapes, max_words=1)
    trainer = make_trainer(tmp_path)
    run_stage(trainer.fit, module, data)
    assert module.vocabulary is not None and len(module.vocabulary) == 5
    references = {word for image in module.results for words in image.reference_words for word in words}
    assert len(references) > 5
    assert {word for image in module.results for word in image.words} <= set(module.vocabulary.words)


def test_a_module_without_data_names_the_call_that_is_missing(shapes, tmp_path):
    with pytest.raises(RuntimeError, match=r"call its connect\(data\) before the trainer starts"):
        make_trainer(tmp_path).fit(make_module(), datamodule=make_data(shapes))


def test_overfits_a_handful_of_images(shapes, tmp_path):
    module = make_module(hidden_dim=48, dropout=0.0, lr=2e-2, objective=Likelihood(attention_penalty=0.0))
    data = make_data(shapes, batch_size=10, limit_images=2)
    trainer = make_trainer(tmp_path, max_epochs=60, limit_val_batches=0)
    run_stage(trainer.fit, module, data)
    assert float(trainer.callback_metrics["train/nll"]) < 0.5  # log V is about 3.5


def test_unfreeze_waits_for_its_epoch(shapes, tmp_path):
    module, data = make_module(), make_data(shapes)
    before = [p.detach().clone() for p in module.encoder.parameters()]
    trainer = make_trainer(tmp_path, callbacks=[Unfreeze(1)])
    run_stage(trainer.fit, module, data)
    assert all(torch.equal(a, b) for a, b in zip(before, module.encoder.parameters(), strict=True))
    run_stage(make_trainer(tmp_path, callbacks=[Unfreeze(0)]).fit, module, data)
    assert any(not torch.equal(a, b) for a, b in zip(before, module.encoder.parameters(), strict=True))


def test_samples_are_drawn_for_the_first_validation_images(shapes, tmp_path):
    run_stage(make_trainer(tmp_path, callbacks=[CaptionSamples(2)]).fit, make_module(), make_data(shapes))
    first = shapes.index("val").image_ids[:2].tolist()
    assert sorted(p.name for p in (tmp_path / "samples").iterdir()) == [f"{i}_001.png" for i in first]


def test_samples_of_a_summed_output_show_the_posterior(shapes, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "captioning.views.overlays.attention_figure",
        lambda view, words, trace, cells, **options: drawn.append((words, trace, options)) or Figure(),
    )
    module = make_module(output=SummedOutput())
    run_stage(make_trainer(tmp_path, callbacks=[CaptionSamples(2)]).fit, module, make_data(shapes))
    assert len(drawn) == 2
    for words, trace, options in drawn:
        assert trace.posterior.shape == trace.alphas.shape == (len(words), 36)
        torch.testing.assert_close(trace.posterior.sum(1), torch.ones(len(words)))
        assert (options["photo"].size, options["region"]) == ((48, 48), (0, 0, 1, 1))


def test_crash_while_saving_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "x.ckpt"
    AtomicCheckpointIO().save_checkpoint({"a": 1}, path)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("captioning.files.os.replace", fail)
    with pytest.raises(InputError, match=r"x\.ckpt: cannot be written \(disk full\)"):
        AtomicCheckpointIO().save_checkpoint({"a": 2}, path)
    assert torch.load(path, weights_only=True) == {"a": 1}


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
    run_stage(make_trainer(tmp_path, max_steps=2, **options).fit, module, make_data(shapes))
    assert norms == [pytest.approx(options["gradient_clip_val"], rel=0.01)] * 2


def test_a_ramp_moves_by_one_per_batch_also_with_accumulated_gradients_and_after_a_resume(shapes, tmp_path):
    class Probabilities(pl.Callback):
        def on_train_batch_end(self, trainer, module, *_: Any) -> None:
            probabilities.append(float(trainer.callback_metrics["train/sample_probability"]))

    def fit(max_steps: int, **options) -> pl.Trainer:
        options |= {"max_epochs": -1, "max_steps": max_steps, "accumulate_grad_batches": 2, "limit_val_batches": 0}
        resume = {"ckpt_path": options.pop("ckpt_path"), "weights_only": True} if "ckpt_path" in options else {}
        trainer = make_trainer(tmp_path, callbacks=[Probabilities()], **options)
        # The second pass of this baseline must not count as a batch of its own.
        objective = Likelihood(estimator=ArgmaxBaseline())
        module = make_module(HardAttention(AdditiveScore(10), ramp=(0, 10)), objective=objective)
        run_stage(trainer.fit, module, make_data(shapes), **resume)
        assert int(module.attention.batches) == 2 * max_steps
        return trainer

    probabilities: list[float] = []
    fit(2).save_checkpoint(tmp_path / "x.ckpt")
    fit(3, ckpt_path=tmp_path / "x.ckpt")
    assert probabilities == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2, 0.25])


@pytest.mark.parametrize(("first", "said"), [(5, False), (6, True)])
def test_a_ramp_that_the_training_does_not_reach_is_said(shapes, tmp_path, caplog, first, said):
    caplog.set_level("INFO")
    options = {"max_epochs": -1, "max_steps": 3, "accumulate_grad_batches": 2, "limit_val_batches": 0}
    module = make_module(HardAttention(AdditiveScore(10), ramp=(first, 10)))
    run_stage(make_trainer(tmp_path, **options).fit, module, make_data(shapes))
    message = (
        "no context will be drawn: the ramp of HardAttention begins at batch 6, and the training has 6; set --model."
    )
    assert (message in caplog.text) == said


def test_gradients_are_clipped_with_a_fused_optimizer_and_scaled_float16_too(tmp_path):
    """What Lightning refuses: its scaler leaves the unscaling to a fused step, so that clipping would see it scaled."""
    module = make_module()
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    module.parameters = lambda recurse=True: iter([weight])
    module.trainer = make_trainer(tmp_path, plugins=[precision])
    logged = {}
    module.log = logged.__setitem__
    scaler.scale((3 * weight).sum()).backward()
    module.configure_gradient_clipping(optimizer, 0.5, "norm")
    scaler.step(optimizer)
    torch.testing.assert_close(weight.detach(), torch.full((4,), 0.75))  # 1 - 0.5 / sqrt(4): unscaled once, and clipped
    assert float(logged["train/gradient_norm"]) == pytest.approx(6.0) and logged["train/learning_rate"] == 1.0
