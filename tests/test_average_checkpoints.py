"""A checkpoint that is the mean of others: its weights by hand, its use, and checkpoints without a mean."""

from pathlib import Path

import pytest
import torch
from helpers import save_image
from helpers_faults import command
from helpers_runs import WORDS, edit_checkpoint, save_checkpoint
from torch import Tensor

from captioning.attention import HardAttention
from captioning.inference import load
from captioning.model import SummedOutput


@pytest.fixture(autouse=True)
def workdir(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(name: str, shift: float = 0.0, *, batches: int = 0, **options) -> Path:
    """A checkpoint whose parameters are ``shift`` times their own size away from those of another."""
    path = save_checkpoint(Path(name), **options)

    def edit(content: dict) -> None:
        state = content["state_dict"]
        for key, tensor in state.items():
            if key.endswith("num_batches_tracked"):
                tensor.fill_(batches)
            elif tensor.is_floating_point() and "running" not in key:
                state[key] = tensor * (1 + shift)

    edit_checkpoint(path, edit)
    return path


def main(models: list[object], *words: object) -> None:
    command("average", *(f"--model={model}" for model in models), *words)


def weights(path: str | Path) -> dict[str, Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def test_a_mean_of_models_with_one_encoder_keeps_it_and_its_features():
    def edit(content: dict) -> None:
        next(tensor for key, tensor in content["state_dict"].items() if ".encoder." in key).flatten()[0] = -0.0

    for name in ("a.ckpt", "b.ckpt"):
        edit_checkpoint(save_checkpoint(Path(name)), edit)
    main(["a.ckpt", "b.ckpt"], "--output", "mean.ckpt")
    assert load("mean.ckpt").encoder.identity() == load("b.ckpt").encoder.identity()


@pytest.mark.parametrize("kinds", [{}, {"attention": HardAttention}, {"output": SummedOutput}])
def test_floats_are_means_and_integers_are_the_last_checkpoints(kinds, capsys):
    first, second = ({name: kind() if name == "output" else kind for name, kind in kinds.items()} for _ in range(2))
    paths = [make("a.ckpt", batches=3, **first), make("b.ckpt", 0.5, batches=8, **second)]
    before = [weights(path) for path in paths]
    main(paths, "--fraction", 1, "--fraction", 3, "--output", "new/mean.ckpt")
    assert "written to new/mean.ckpt: 0.25 of a.ckpt, 0.75 of b.ckpt" in capsys.readouterr().out
    averaged = weights("new/mean.ckpt")
    assert averaged.keys() == before[0].keys() and not all(tensor.is_floating_point() for tensor in averaged.values())
    for name, tensor in averaged.items():
        first, last = (state[name] for state in before)
        expected = 0.25 * first + 0.75 * last if last.is_floating_point() else last
        torch.testing.assert_close(tensor, expected)
        assert tensor.dtype == last.dtype
    for path, state in zip(paths, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in weights(path).items())


def test_a_mean_captions_names_its_checkpoints_and_has_no_optimizer_state(tmp_path):
    image = save_image(tmp_path / "photo.png", seed=3)
    main([make("a.ckpt"), make("b.ckpt", 0.2)], "--output", "mean.ckpt")
    content = torch.load("mean.ckpt", weights_only=True)
    assert "optimizer_states" not in content
    assert content["captioning"]["settings"]["averaged"] == [
        {"checkpoint": "a.ckpt", "fraction": 0.5},
        {"checkpoint": "b.ckpt", "fraction": 0.5},
    ]
    assert set(load("mean.ckpt").caption(image).words) <= set(WORDS)
    main(["mean.ckpt", "a.ckpt"], "--output", "again.ckpt")  # of a mean, too, there is a mean
    name = next(name for name in weights("a.ckpt") if name.endswith("L_o.bias") or "gates" in name)
    torch.testing.assert_close(weights("again.ckpt")[name], weights("a.ckpt")[name] * 1.05)


STATISTICS = "captioner.encoder.network.stage1.1.running_var"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content["captioning"].update(vocabulary=list("bcdefgh")), "vocabulary is not that of b.ckpt"),
        (lambda content: content["captioning"]["preprocessing"].update(mean=[0, 0, 0]), "encoder is not that of b"),
        (lambda content: content.pop("captioning"), "a.ckpt: not a checkpoint of this project"),
        (lambda content: content["state_dict"][STATISTICS].add_(1), "stage1.1.running_var is not that of b.ckpt"),
        (lambda content: None, "a.ckpt: its decoder is not that of b.ckpt; they have no mean"),
    ],
)
def test_checkpoints_without_a_mean_are_refused_and_nothing_is_written(edit, message, capsys):
    edit_checkpoint(make("a.ckpt", gated="decoder" not in message), edit)
    refused(["a.ckpt", make("b.ckpt")], message=message, capsys=capsys)


@pytest.mark.parametrize(
    ("models", "words", "message"),
    [
        (["a.ckpt", "b.ckpt"], ["--fraction", 1], "fractions must be 2 numbers of at least 0, not all 0, got 1.0"),
        (["a.ckpt", "b.ckpt"], ["--fraction=0", "--fraction=0"], "at least 0, not all 0, got 0.0, 0.0"),
        (["a.ckpt", "gone.ckpt"], [], "gone.ckpt: the checkpoint cannot be read"),
    ],
)
def test_options_that_cannot_be_used_are_one_line(models, words, message, capsys):
    make("a.ckpt"), make("b.ckpt")
    refused(models, *words, message=message, capsys=capsys)


def refused(models: list[object], *words: object, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(models, *words, "--output", "mean.ckpt")
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and message in line
    assert not Path("mean.ckpt").exists()
