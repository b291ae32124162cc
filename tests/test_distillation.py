"""Distillation against a loop over captions and steps, and the teachers that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers_runs import edit_checkpoint, save_checkpoint
from helpers_training import last_checkpoint, make_data, make_module, make_shapes, make_trainer, run_stage

from captioning.checkpoint.load import read_model
from captioning.data.batch import CaptionBatch, pad_captions
from captioning.errors import InputError
from captioning.model import MarginalOutput
from captioning.objective import Likelihood
from captioning.training import Distillation
from captioning.vocabulary import Vocabulary


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def teachers() -> list[str]:
    """Two models of one encoder, whose decoders differ."""
    first = save_checkpoint(Path("a.ckpt"))
    encoder = read_model(first).captioner.encoder
    save_checkpoint(Path("b.ckpt"), output=MarginalOutput(rank=3), with_encoder=encoder)
    return ["a.ckpt", "b.ckpt"]


@pytest.mark.parametrize("samples", [1, 3])
def test_the_term_is_the_mean_divergence_over_words_from_the_mean_of_the_teachers(samples):
    paths = teachers()
    student = read_model(save_checkpoint(Path("c.ckpt"), gated=False))
    captioner, annotations = student.captioner.train(), torch.randn(2, 9, 6)
    captioner.encoder.load_state_dict(read_model("a.ckpt").captioner.encoder.state_dict())
    images = torch.arange(2)
    captions = [[5, 6, 7], [8, 4]]
    batch = CaptionBatch(*pad_captions(captions), images, images, images, annotations=annotations)
    term = Distillation(paths, weight=0.7)
    term.begin(student.vocabulary, captioner.encoder)
    objective = Likelihood(attention_penalty=0.0, samples=samples, terms=[term]).connect(captioner.decoder.attention)
    torch.manual_seed(0)
    loss, logged, output = objective(captioner, batch)

    expected, words = torch.tensor(0.0), 0
    students = torch.log_softmax(output.logits, dim=-1).split([(n + 1) for n in (3, 2) for _ in range(samples)])
    members = [read_model(path).captioner.eval() for path in paths]
    for number, caption in enumerate(captions):
        one = CaptionBatch(
            *pad_captions([caption]), images[:1], images[:1], images[:1], annotations=annotations[number : number + 1]
        )
        p = sum(torch.softmax(member(one).logits, dim=-1) for member in members) / 2
        for log_q in students[number * samples : (number + 1) * samples]:
            for t in range(len(caption) + 1):
                expected = expected + sum(p[t, v] * (p[t, v].log() - log_q[t, v]) for v in range(p.shape[1]))
                words += 1
    torch.testing.assert_close(logged["distillation"], (expected / words).detach())
    torch.testing.assert_close(loss, logged["nll"] + 0.7 * expected / words)
    loss.backward()
    assert all(p.grad is None for member in term._ensemble[0].captioners for p in member.parameters())
    assert not objective.state_dict()


def test_a_run_reads_its_teacher_and_its_checkpoint_needs_none(tmp_path):
    data = make_data(make_shapes(tmp_path, train=12, val=4))
    teaching = make_trainer(tmp_path, callbacks=[last_checkpoint(tmp_path / "one")], enable_checkpointing=True)
    run_stage(teaching.fit, make_module(), data)
    teacher = tmp_path / "one/last.ckpt"
    term = Distillation([str(teacher)])
    student = make_module(objective=Likelihood(terms=[term]))
    student.start = read_model(teacher)  # the same encoder
    learning = make_trainer(tmp_path, callbacks=[last_checkpoint(tmp_path / "two")], enable_checkpointing=True)
    run_stage(learning.fit, student, data)
    assert 0 < learning.callback_metrics["train/distillation"] < 2
    teacher.unlink()
    read_model(tmp_path / "two/last.ckpt")


def test_teachers_of_other_words_or_of_another_encoder_are_refused():
    first, _ = teachers()
    model = read_model(first)
    term = Distillation([first])
    with pytest.raises(InputError, match=r"a\.ckpt: its vocabulary"):
        term.begin(Vocabulary(["dog"]), model.captioner.encoder)
    edit_checkpoint(first, lambda content: [t.add_(1) for k, t in content["state_dict"].items() if "encoder" in k])
    with pytest.raises(InputError, match=r"a\.ckpt: a teacher must have the encoder of the run"):
        term.begin(model.vocabulary, model.captioner.encoder)
    with pytest.raises(InputError, match=r"missing\.ckpt"):
        Distillation(["missing.ckpt"]).begin(model.vocabulary, model.captioner.encoder)


@pytest.mark.parametrize("options", [{"teachers": []}, {"teachers": ["a.ckpt"], "weight": -1.0}])
def test_impossible_options_are_refused(options):
    with pytest.raises(InputError):
        Distillation(**options)
