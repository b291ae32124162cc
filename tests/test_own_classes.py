"""Mistakes in a class of the user: one line with the class, the expected shape and the actual one."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from helpers_faults import refusal
from helpers_runs import tiny_config

from captioning.__main__ import main
from captioning.attention import AdditiveScore, SoftAttention
from captioning.cli import IMPORTED_MODULES
from captioning.data.shapes import ShapesSource
from captioning.encoders import ConvEncoder
from captioning.errors import InputError
from captioning.inference import load
from captioning.model import AttentionDecoder, Captioner

OWN = """
from pathlib import Path

import torch
from torch import nn

from captioning.attention import Attention, DotScore, SoftAttention, Score
from captioning.attention.memory import repeat_rows
from captioning.encoders import ConvEncoder
from captioning.model import Decoder
from captioning.model.decoder import ExistingSteps
from captioning.objective import Likelihood
from captioning.trace import AttentionTrace


class Plain(Score):
    def __init__(self, size: int = 4) -> None:
        self.size = size

    def build(self, annotation_dim, query_dim, grid_size):
        self.position = nn.Linear(annotation_dim, query_dim)

    def project(self, annotations):
        return self.position(annotations)

    def forward(self, query, projected):
        return query @ projected.mT


class Column(Plain):
    def __init__(self) -> None:
        Score.__init__(self)

    def forward(self, query, projected):
        return super().forward(query, projected).unsqueeze(-1)


class Located(Column):
    def __init__(self, file: Path = Path("x")) -> None:
        super().__init__()


class Silent(Column):
    def forward(self, query, projected):
        super().forward(query, projected)


class Narrow(SoftAttention):
    def select(self, alphas, log_alphas, memory):
        attention_output = super().select(alphas, log_alphas, memory)
        return attention_output._replace(context=attention_output.context[..., 1:])


class Flat(ConvEncoder):
    def forward(self, images):
        return super().forward(images).flatten(1)


class GRU(Decoder):
    def __init__(self, attention: Attention, size: int = 8) -> None:
        super().__init__(attention)
        self.size = size

    def build(self, vocabulary_size, annotation_dim, grid_size):
        D = self.build_for_annotations(annotation_dim, grid_size)
        self.embedding = nn.Embedding(vocabulary_size, self.size)
        self.attention.build(D, self.size, grid_size)
        self.cell, self.output = nn.GRUCell(self.size + D, self.size), nn.Linear(self.size, vocabulary_size)

    def prepare_memory(self, annotations, mask):
        return self.attention.prepare(annotations, mask)

    def init_state(self, memory):
        return (memory.annotations.new_zeros(len(memory.annotations), self.size), *self.attention.init_state(memory))

    def step(self, tokens, state, memory):
        attention_output, rest = self.attention(state[0], memory, state[1:])
        h = self.cell(torch.cat([self.embedding(tokens), attention_output.context], dim=-1), state[0])
        return self.output(h), (h, *rest), attention_output.trace()

    def forward(self, captions, lengths, memory, samples=1):
        existing = ExistingSteps(captions, lengths)
        state = tuple(repeat_rows(x, len(captions) // len(memory.annotations)) for x in self.init_state(memory))
        logits, traces = [], []
        for tokens in captions[:, :-1].T:
            out, state, trace = self.step(tokens, state, memory)
            logits.append(out)
            traces.append(trace)
        steps = zip(*traces)
        trace = AttentionTrace(*(None if field[0] is None else torch.stack(field, 1) for field in steps))
        return existing.decoder_output(existing.pack(torch.stack(logits, 1)), trace)


class PerWord(Likelihood):
    def forward(self, captioner, batch):
        loss = super().forward(captioner, batch)
        return loss._replace(loss=loss.loss.expand(3))
"""


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("own")
    ShapesSource(str(folder / "shapes"), train=4, val=2, test=2, image_size=48).prepare()
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny_config(folder / "shapes")))
    (folder / "own_classes.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        yield folder
    IMPORTED_MODULES.clear()


SCORE = "model.decoder.init_args.attention.init_args.score"
ATTENTION = "model.decoder.init_args.attention"


@pytest.mark.parametrize(
    ("place", "name", "line"),
    [
        (SCORE, "Located", "Located: its arguments must be plain data or components, got PosixPath"),
        (SCORE, "Column", "Column: logits (B, R, L) must have the shape (10, 1, 36), got (10, 1, 36, 1)"),
        (SCORE, "Silent", "Silent: logits (B, R, L) must have the shape (10, 1, 36), got NoneType"),
        (ATTENTION, "Narrow", "Narrow: the context (B, R, D) must have the shape (10, 1, 8), got (10, 1, 7)"),
        ("model.encoder", "Flat", "Flat: annotations (B, L, D) must have the shape (4, 288, 8), got (4, 288)"),
        ("model.objective", "PerWord", "PerWord: the loss () must have the shape (), got (3,)"),
    ],
)
def test_a_wrong_shape_is_named_with_its_class_and_both_shapes(workdir, capsys, place, name, line):
    words = [f"--{place}", f"own_classes.{name}"]
    assert line in refusal(capsys, "fit", "--config", "tiny.yaml", "--import", "own_classes", *words)


def test_a_decoder_and_its_parts_belong_to_one_captioner():
    class Scaled(AdditiveScore):
        def __init__(self, attention_dim: int) -> None:
            super().__init__(attention_dim)
            self.scale = torch.nn.Parameter(torch.ones(()))  # before it is built

    encoder, parts = ConvEncoder((4, 6), (2, 2), image_size=16), {"embedding_dim": 8, "hidden_dim": 7}
    decoder = AttentionDecoder(SoftAttention(Scaled(5)), **parts)
    Captioner(encoder, decoder, vocabulary_size=9)
    for second, part in (
        (decoder, "AttentionDecoder"),
        (AttentionDecoder(decoder.attention, **parts), "SoftAttention"),
    ):
        with pytest.raises(InputError, match=f"{part}: is another captioner's; make one for each captioner"):
            Captioner(encoder, second, vocabulary_size=9)


def test_a_decoder_of_the_user_trains_and_captions(workdir):
    attention = tiny_config(workdir / "shapes")["model"]["decoder"]["init_args"]["attention"]
    decoder = json.dumps({"class_path": "own_classes.GRU", "init_args": {"attention": attention}})
    main(
        [
            *"fit --config tiny.yaml --import own_classes --name gru --trainer.max_epochs 1".split(),
            f"--model.decoder={decoder}",
        ]
    )
    captioner = load("runs/gru/checkpoints/last.ckpt")
    caption = captioner(next((workdir / "shapes").rglob("*.png")))
    assert caption.trace.alphas.shape == (len(caption.words), 36)
