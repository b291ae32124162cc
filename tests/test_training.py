"""Training through Lightning on a handful of shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from captioning.attention import AdditiveScore, SoftAttention
from captioning.callbacks import AtomicCheckpointIO, CaptionSamples, Throughput, Unfreeze
from captioning.data.datamodule import CaptionDataModule
from captioning.data.shapes import ShapesSource
from captioning.decoder import AttentionDecoder
from captioning.decoding import BeamOptions
from captioning.encoders import ConvEncoder
from captioning.errors import InputError
from captioning.schedules import WarmupCosine
from captioning.training import CaptioningModule


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> ShapesSource:
    source = ShapesSource(str(tmp_path_factory.mktemp("data") / "shapes"), train=10, val=4, test=3, image_size=48)
    source.prepare()
    return source


def make_module(*, hidden_dim: int = 14, dropout: float = 0.3, lr: float = 3e-3, **options) -> CaptioningModule:
    torch.manual_seed(3)
    encoder = ConvEncoder((8, 12), (4, 2), image_size=48)
    decoder = AttentionDecoder(
        SoftAttention(AdditiveScore(10)), embedding_dim=9, hidden_dim=hidden_dim, dropout=dropout
    )
    options = {"search": BeamOptions(beam_size=2, max_length=12)} | options
    return CaptioningModule(encoder, decoder, optimizer=lambda p: torch.optim.Adam(p, lr=lr), **options)


def make_trainer(folder: Path, **options) -> pl.Trainer:
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "plugins": [AtomicCheckpointIO()],
        "max_epochs": 1,
        "limit_val_batches": 1,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(default_root_dir=folder, **defaults | options)


def make_data(source: ShapesSource, **options) -> CaptionDataModule:
    return CaptionDataModule(source, **{"batch_size": 8, "eval_batch_size": 3, "num_workers": 0} | options)


def weights(module: CaptioningModule) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_fit_logs_the_fixed_keys(shapes, tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[Throughput(every_n_steps=2)])
    trainer.fit(make_module(), datamodule=make_data(shapes))
    logged = trainer.logged_metrics
    for key in ("loss", "nll", "attention_penalty", "attention_entropy", "captions_per_second"):
        assert f"train/{key}" in logged
    for key in ("nll", "bleu1", "bleu2", "bleu3", "bleu4"):
        assert f"val/{key}" in logged
    torch.testing.assert_close(
        logged["train/loss"], logged["train/nll"] + logged["train/attention_penalty"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("stop_at", [3, 7, 10])
def test_resumed_run_ends_with_the_same_weights_as_an_uninterrupted_one(shapes, tmp_path, stop_at):
    """7 steps an epoch: stopped inside the first, at the end of the first, and inside the second."""
    whole = make_module()
    make_trainer(tmp_path, max_epochs=-1, max_steps=14).fit(whole, datamodule=make_data(shapes))

    first = make_module()
    trainer = make_trainer(tmp_path, max_epochs=-1, max_steps=stop_at)
    trainer.fit(first, datamodule=make_data(shapes))
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")

    resumed = make_module()
    torch.manual_seed(99)  # the stream of random numbers must come from the checkpoint
    trainer = make_trainer(tmp_path, max_epochs=-1, max_steps=14)
    trainer.fit(resumed, datamodule=make_data(shapes), ckpt_path=tmp_path / "stopped.ckpt", weights_only=True)
    assert trainer.global_step == 14
    for name, value in weights(whole).items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("steps_before", [7, 10])
@pytest.mark.parametrize("scheduled", [False, True])
def test_run_of_so_many_epochs_resumes_exactly_from_the_checkpoint_that_its_callback_left(
    shapes, tmp_path, steps_before, scheduled
):
    """7 steps an epoch. The last checkpoint is of the end of the first epoch, or of a crash inside the second."""

    class Crash(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 10:
                raise KeyError("a crash")

    def fit(module: CaptioningModule, *callbacks: pl.Callback, **options) -> None:
        last = ModelCheckpoint(tmp_path, "last", save_on_exception=steps_before == 10, enable_version_counter=False)
        trainer = make_trainer(tmp_path, max_epochs=2, enable_checkpointing=True, callbacks=[last, *callbacks])
        trainer.fit(module, datamodule=make_data(shapes), **options)

    scheduler = {"scheduler": lambda optimizer, steps: WarmupCosine(optimizer, steps, 2)} if scheduled else {}
    whole = make_module(**scheduler)
    fit(whole)
    with pytest.raises(KeyError):
        fit(make_module(**scheduler), Crash())
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == steps_before

    resumed = make_module(**scheduler)
    torch.manual_seed(99)
    fit(resumed, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    for name, value in weights(whole).items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=0, msg=name)


def test_checkpoint_holds_all_that_rebuilds_the_captioner_and_runs_no_code(shapes, tmp_path):
    module = make_module()
    trainer = make_trainer(tmp_path)
    trainer.fit(module, datamodule=make_data(shapes))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["captioning"]
    assert set(saved) == {"format", "encoder", "decoder", "preprocessing", "vocabulary", "settings"}
    assert saved["decoder"]["init_args"]["attention"]["class_path"].endswith("SoftAttention")
    assert not list(tmp_path.glob("*.part"))


def test_checkpoint_of_another_vocabulary_is_refused(shapes, tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.fit(make_module(), datamodule=make_data(shapes))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(InputError, match="the checkpoint's vocabulary"):
        make_trainer(tmp_path).validate(
            make_module(), datamodule=make_data(shapes, max_words=5), ckpt_path=tmp_path / "x.ckpt", verbose=False
        )


def test_test_writes_scores_and_every_caption(shapes, tmp_path):
    module, data = make_module(), make_data(shapes)
    trainer = make_trainer(tmp_path, limit_test_batches=None)
    trainer.fit(module, datamodule=data)
    (scores,) = trainer.test(module, datamodule=data, verbose=False)
    written = json.loads((tmp_path / "test_metrics.json").read_text())
    captions = json.loads((tmp_path / "test_captions.json").read_text())
    assert written["test/bleu1"] == pytest.approx(scores["test/bleu1"], abs=1e-4)
    assert written["search"]["beam_size"] == 2
    index = shapes.index("test")
    assert [c["image_id"] for c in captions] == index.image_ids.tolist()
    assert captions[2]["references"] == index.references(2)


def test_predict_captions_every_image_of_the_test_split(shapes, tmp_path):
    module, data = make_module(), make_data(shapes)
    trainer = make_trainer(tmp_path)
    trainer.fit(module, datamodule=data)
    predictions = [p for batch in trainer.predict(module, datamodule=data) for p in batch]
    assert [p["image_id"] for p in predictions] == shapes.index("test").image_ids.tolist()
    assert all(isinstance(p["caption"], str) for p in predictions)


def test_bleu_is_scored_on_free_running_captions_against_words_the_vocabulary_lacks(shapes, tmp_path):
    """With a vocabulary of one word, references keep their words: nothing a model says can match <unk>."""
    module, data = make_module(), make_data(shapes, max_words=1)
    trainer = make_trainer(tmp_path)
    trainer.fit(module, datamodule=data)
    assert module.vocabulary is not None and len(module.vocabulary) == 5
    references = {word for image in module.results for reference in image.references for word in reference}
    assert len(references) > 5
    assert {word for image in module.results for word in image.words} <= set(module.vocabulary.words)


def test_overfits_a_handful_of_images(shapes, tmp_path):
    module = make_module(hidden_dim=48, dropout=0.0, lr=2e-2, attention_penalty=0.0)
    data = make_data(shapes, batch_size=10, limit_images=2)
    trainer = make_trainer(tmp_path, max_epochs=60, limit_val_batches=0)
    trainer.fit(module, datamodule=data)
    assert float(trainer.callback_metrics["train/nll"]) < 0.5  # log V is about 3.5


def test_unfreeze_waits_for_its_epoch(shapes, tmp_path):
    module, data = make_module(), make_data(shapes)
    before = [p.detach().clone() for p in module.encoder.parameters()]
    trainer = make_trainer(tmp_path, callbacks=[Unfreeze(1)])
    trainer.fit(module, datamodule=data)
    assert all(torch.equal(a, b) for a, b in zip(before, module.encoder.parameters(), strict=True))
    make_trainer(tmp_path, callbacks=[Unfreeze(0)]).fit(module, datamodule=data)
    assert any(not torch.equal(a, b) for a, b in zip(before, module.encoder.parameters(), strict=True))


def test_samples_are_drawn_for_the_first_validation_images(shapes, tmp_path):
    make_trainer(tmp_path, callbacks=[CaptionSamples(2)]).fit(make_module(), datamodule=make_data(shapes))
    first = shapes.index("val").image_ids[:2].tolist()
    assert sorted(p.name for p in (tmp_path / "samples").iterdir()) == [f"{i}_000.png" for i in first]


def test_crash_while_saving_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "x.ckpt"
    AtomicCheckpointIO().save_checkpoint({"a": 1}, path)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("captioning.callbacks.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        AtomicCheckpointIO().save_checkpoint({"a": 2}, path)
    assert torch.load(path, weights_only=True) == {"a": 1}


def test_gradients_are_clipped_with_a_fused_optimizer_too(shapes, tmp_path):
    norms = []

    class Recorder(torch.optim.AdamW):
        def step(self, closure=None):
            loss = closure()
            gradients = [p.grad.flatten() for group in self.param_groups for p in group["params"] if p.grad is not None]
            norms.append(float(torch.cat(gradients).norm()))
            return loss

    module = make_module()
    module.optimizer = lambda parameters: Recorder(parameters, lr=1e-3, fused=True)
    make_trainer(tmp_path, gradient_clip_val=0.01, max_steps=2).fit(module, datamodule=make_data(shapes))
    assert norms == [pytest.approx(0.01, rel=0.01)] * 2
