"""A checkpoint that is the mean of others: its weights by hand, what it is good for, and what has no mean."""

from __future__ import annotations

import itertools
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
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(name: str, shift: float = 0.0, *, batches: int = 0, **options) -> Path:
    """A checkpoint whose parameters are ``shift`` times their own size away from those of another."""
    path = save_checkpoint(Path(name), **options)

    def edit(content: dict) -> None:
        state = content["state_dict"]
        for key, tensor in state.items():
            if key.endswith("batches"):
                tensor.fill_(batches)
            elif tensor.is_floating_point() and "running" not in key:
                state[key] = tensor * (1 + shift)

    edit_checkpoint(path, edit)
    return path


def main(*argv: object) -> None:
    """Average the checkpoints that come first in a command line."""
    words = [str(word) for word in argv]
    models = list(itertools.takewhile(lambda word: not word.startswith("--"), words))
    command("average", *(f"--model={model}" for model in models), *words[len(models) :])


def weights(path: str | Path) -> dict[str, Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.parametrize("options", [{}, {"attention": HardAttention}, {"output": SummedOutput()}])
def test_parameters_are_means_and_the_rest_is_the_last_ones(options, capsys):
    paths = [make("a.ckpt", batches=3, **options), make("b.ckpt", 0.5, batches=8, **options)]
    before = [weights(path) for path in paths]
    main(*paths, "--fraction", 1, "--fraction", 3, "--output", "new/mean.ckpt")
    assert "written to new/mean.ckpt: 0.25 of a.ckpt, 0.75 of b.ckpt" in capsys.readouterr().out
    averaged = weights("new/mean.ckpt")
    assert averaged.keys() == before[0].keys()
    for name, tensor in averaged.items():
        first, last = (state[name] for state in before)
        expected = 0.25 * first + 0.75 * last if last.is_floating_point() else last
        torch.testing.assert_close(tensor, expected)
        assert tensor.dtype == last.dtype
    for path, state in zip(paths, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in weights(path).items())


def test_it_captions_says_what_it_is_made_of_and_is_not_trained_on(tmp_path):
    image = save_image(tmp_path / "photo.png", seed=3)
    main(make("a.ckpt"), make("b.ckpt", 0.2), "--output", "mean.ckpt")
    content = torch.load("mean.ckpt", weights_only=True)
    assert "optimizer_states" not in content
    assert content["captioning"]["settings"]["averaged"] == [
        {"checkpoint": "a.ckpt", "fraction": 0.5},
        {"checkpoint": "b.ckpt", "fraction": 0.5},
    ]
    assert set(load("mean.ckpt").caption(image).words) <= set(WORDS)
    main("mean.ckpt", "a.ckpt", "--output", "again.ckpt")  # of a mean, too, there is a mean
    name = next(name for name in weights("a.ckpt") if name.endswith("L_o.bias") or "gates" in name)
    torch.testing.assert_close(weights("again.ckpt")[name], weights("a.ckpt")[name] * 1.05)


def no_words(content: dict) -> None:
    content["captioning"]["vocabulary"] = ["one", *content["captioning"]["vocabulary"][1:]]


def other_view(content: dict) -> None:
    content["captioning"]["preprocessing"]["mean"] = [0.0, 0.0, 0.0]


def other_statistics(content: dict) -> None:
    content["state_dict"]["captioner.encoder.network.stage1.1.running_var"] += 1


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (no_words, "a.ckpt: its vocabulary is not that of b.ckpt; they have no mean"),
        (other_view, "a.ckpt: its encoder is not that of b.ckpt"),
        (lambda content: content.pop("captioning"), "a.ckpt: not a checkpoint of this project"),
        (other_statistics, "stage1.1.running_var is not that of b.ckpt"),
        (None, "a.ckpt: its decoder is not that of b.ckpt"),
    ],
)
def test_what_has_no_mean_is_named_and_nothing_is_written(edit, message, capsys):
    edit_checkpoint(make("a.ckpt", gated=edit is not None), edit or (lambda content: None))
    refused("a.ckpt", make("b.ckpt"), message=message, capsys=capsys)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a.ckpt", "b.ckpt", "--fraction", "1"], "there are 1 fractions for 2 checkpoints; give each checkpoint one"),
        (["a.ckpt", "b.ckpt", "--fraction=0", "--fraction=0"], "at least 0 and not all 0, got 0.0, 0.0"),
        (["a.ckpt", "gone.ckpt"], "--model gone.ckpt: no such file"),
        (["a.ckpt", "pretrained"], "--model pretrained: is no checkpoint; give the FILE.ckpt that it is from"),
    ],
)
def test_options_that_cannot_be_used_are_one_line(argv, message, capsys):
    make("a.ckpt"), make("b.ckpt")
    refused(*argv, message=message, capsys=capsys)


def refused(*argv: object, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(*argv, "--output", "mean.ckpt")
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and message in line
    assert not Path("mean.ckpt").exists()
