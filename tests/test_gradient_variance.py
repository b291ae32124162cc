"""The measurement of the estimators' variance, on a tiny decoder."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gradient_variance import ESTIMATORS, TEMPERATURES, measure
from captioning.attention import AdditiveScore, SoftAttention, Sparsemax, UniformAttention
from captioning.data.batch import CaptionBatch, pad_captions
from captioning.encoders import ConvEncoder
from captioning.errors import InputError
from captioning.model import AttentionDecoder
from captioning.model.captioner import Captioner

N, L, D, V = 6, 4, 3, 9


def make_captioner(attention) -> Captioner:
    decoder = AttentionDecoder(attention, embedding_dim=5, hidden_dim=6, dropout=0.5)
    captioner = Captioner(ConvEncoder((D,), (4,), image_size=16), decoder, vocabulary_size=V)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return captioner


def make_batch() -> CaptionBatch:
    captions, lengths = pad_captions([torch.randint(4, V, (n,)).tolist() for n in (3, 1, 2, 3, 2, 1)])
    rows = torch.arange(N)
    return CaptionBatch(captions, lengths, rows, rows, rows, annotations=2 * torch.randn(N, L, D))


@pytest.mark.slow
def test_baselines_shrink_the_variance_and_cost_is_counted():
    values = measure(make_captioner(SoftAttention(AdditiveScore(4))), make_batch(), [make_batch()], draws=60)
    assert len(values) == len(ESTIMATORS) + len(TEMPERATURES)
    assert values["none"]["ratio"] == values["none"]["score_ratio"] == 1.0
    for name in ("reward to go", "self-critical, to go", "leave one out, 4 draws, to go"):
        assert values[name]["score_ratio"] < 0.7
    two, eight = (values[f"leave one out, {draws} draws, to go"] for draws in (2, 8))
    assert eight["score_variance"] < two["score_variance"]
    assert [row["rows"] for row in (values["none"], values["self-critical, caption"], eight)] == [1, 2, 8]


def test_the_locations_of_a_sparse_checkpoint_are_drawn_from_its_support():
    captioner = make_captioner(SoftAttention(AdditiveScore(4), normaliser=Sparsemax()))
    supports = []
    captioner.decoder.attention.normaliser.register_forward_hook(lambda _, __, out: supports.append(out[0] > 0))
    values = measure(captioner, make_batch(), [], draws=2)
    assert supports and not any("Gumbel" in name for name in values)


def test_attention_without_a_score_is_refused():
    with pytest.raises(InputError, match="UniformAttention learns nothing from draws"):
        measure(make_captioner(UniformAttention()), make_batch(), [], draws=2)
