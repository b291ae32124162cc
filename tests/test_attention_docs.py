"""docs/attention.md: its tables are complete, and its example works as described."""

import importlib
import inspect
import operator
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

import captioning.attention
from captioning.attention import Attention, Normalizer, Score
from captioning.attention.hard import StochasticAttention
from captioning.cli import IMPORTED_MODULES
from captioning.cli.build import build, restrict_imports
from captioning.data.batch import pad_captions
from captioning.model import AttentionDecoder, SummedOutput

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
B, R, L, D, E, H, V = 2, 3, 9, 7, 5, 10, 13


def block(language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL).group(1)


@pytest.fixture
def my_attention(tmp_path, monkeypatch):
    (tmp_path / "my_attention.py").write_text(block("python"))
    (tmp_path / "my_attention.yaml").write_text(block("yaml"))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("my_attention")
    del sys.modules["my_attention"]


def test_tables_have_every_score_normalizer_and_selection_and_configs_that_exist():
    for name, value in vars(captioning.attention).items():
        if inspect.isclass(value) and issubclass(value, (Attention, Normalizer, Score)):
            abstract = value in (Attention, Normalizer, Score, StochasticAttention)
            assert abstract or f"\n| `{name}` |" in DOCUMENT, name
    named = re.findall(r"`((?:shapes|coco)_\w+)`", DOCUMENT)
    assert {"shapes_local", "shapes_multihead", "shapes_bilstm"} <= set(named)
    assert all((ROOT / "configs" / f"{name}.yaml").is_file() for name in named)


def test_every_equation_stands_where_the_table_says():
    places = re.findall(r"`(\w+)/(\w+)\.py`: ((?:`[\w.]+`(?:, )?)+)", DOCUMENT)
    assert len(places) > 10
    for room, module, names in places:
        for name in re.findall(r"[\w.]+", names):
            operator.attrgetter(name)(importlib.import_module(f"captioning.{room}.{module}"))


@pytest.mark.parametrize("masked", [False, True])
def test_example_attends_to_the_k_best_locations_and_learns(my_attention, masked):
    attention = my_attention.TopAttention(my_attention.HadamardScore(), k=3)
    attention = Attention.from_config(attention.to_config())
    decoder = AttentionDecoder(attention, embedding_dim=E, hidden_dim=H, dropout=0.0)
    decoder.build(V, D, (1, L))
    mask = torch.ones(B, L, dtype=torch.bool)
    mask[:, 1:8] = False  # two locations are left, fewer than k
    captions, lengths = pad_captions(torch.randint(4, V, (B * R, 4)).tolist())
    output = decoder(captions, lengths, decoder.encode(torch.randn(B, L, D), mask if masked else None))
    torch.testing.assert_close(output.trace.alphas.sum(-1), torch.ones(B * R, 5))
    (output.logits.logsumexp(-1).sum() + output.trace.alphas.square().sum()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in decoder.parameters())
    assert attention.score.v.grad.any()

    query, memory = torch.randn(B * R, H), decoder.encode(torch.randn(B, L, D), mask if masked else None)
    out = attention(query, memory)[0]
    best = out.alphas.topk(2 if masked else 3)
    weights = best.values / best.values.sum(-1, keepdim=True)
    for row in range(B * R):
        torch.testing.assert_close(out.context[row], weights[row] @ memory.annotations[row // R][best.indices[row]])


def test_example_config_builds_it(my_attention):
    config = yaml.safe_load(block("yaml"))["model"]["decoder"]["init_args"]["attention"]
    IMPORTED_MODULES.append("my_attention")  # as --import does
    try:
        restrict_imports()
        attention = build({"attention": Attention}, [{"attention": config}])[0]["attention"]
    finally:
        IMPORTED_MODULES.remove("my_attention")
    assert isinstance(attention, my_attention.TopAttention) and attention.k == 3
    assert isinstance(attention.score, my_attention.HadamardScore)


def test_example_can_have_a_summed_output(my_attention):
    attention = my_attention.TopAttention(my_attention.HadamardScore(), k=3)
    assert AttentionDecoder(attention, output=SummedOutput()).attention is attention
