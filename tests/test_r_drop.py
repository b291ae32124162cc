"""R-Drop: the divergence between a caption's rows against a plain computation, for every attention and output."""

from __future__ import annotations

import math

import pytest
import torch

from captioning.attention import (
    AdditiveScore,
    GumbelAttention,
    HardAttention,
    MultiHeadAttention,
    ScaledDotScore,
    SoftAttention,
)
from captioning.data.batch import CaptionBatch, pad_captions
from captioning.decoder import AttentionDecoder
from captioning.encoders import ConvEncoder
from captioning.errors import InputError
from captioning.model import Captioner
from captioning.objective import ArcticReduction, LeaveOneOut, RewardToGo, losses
from captioning.objective.objective import Objective
from captioning.output import MarginalOutput

B, L, D, V = 3, 6, 4, 11
WORDS = ([4, 6, 5], [5], [7, 10])


def make_captioner(attention, output=None, dropout: float = 0.5) -> Captioner:
    decoder = AttentionDecoder(attention, embedding_dim=6, hidden_dim=7, dropout=dropout, output=output)
    captioner = Captioner(ConvEncoder((D,), (4,), image_size=16), decoder, vocabulary_size=V)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return captioner.train()


def make_batch() -> CaptionBatch:
    captions, lengths = pad_captions([*WORDS])
    each = torch.arange(B)
    return CaptionBatch(captions, lengths, each, each, each, annotations=torch.randn(B, L, D))


def plain_divergences(logits: torch.Tensor, rows: int) -> list[list[float]]:
    """Word by word and probability by probability, (captions, steps)."""
    table, start = [], 0
    steps = [len(words) + 1 for words in WORDS]
    blocks = []
    for count in steps:
        blocks.append([logits[start + row * count : start + (row + 1) * count].tolist() for row in range(rows)])
        start += rows * count
    assert start == len(logits)
    for caption in blocks:
        found = []
        for t in range(len(caption[0])):
            total = 0.0
            for row in range(rows - 1):
                p, q = (
                    [math.exp(x) / sum(map(math.exp, caption[r][t])) for x in caption[r][t]] for r in (row, row + 1)
                )
                total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
                total += sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
            found.append(total / 2 / (rows - 1))
        table.append(found)
    return table


@pytest.mark.parametrize("rows", [2, 3])
def test_divergence_equals_a_loop_over_words(rows):
    lengths = torch.tensor([len(words) + 1 for words in WORDS]).repeat_interleave(rows)
    mask = torch.arange(5) < lengths.unsqueeze(1)
    logits = torch.randn(int(mask.sum()), V)
    found = losses.row_divergence(logits, mask, rows)
    assert found.shape == (B, 5)
    for caption, expected in zip(found.tolist(), plain_divergences(logits, rows), strict=True):
        assert caption == pytest.approx([*expected, *[0.0] * (5 - len(expected))], abs=1e-6)


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        (SoftAttention(AdditiveScore(5)), {"rows_per_caption": 2}),
        (SoftAttention(AdditiveScore(5)), {"rows_per_caption": 3}),
        (MultiHeadAttention(ScaledDotScore(), heads=2), {"rows_per_caption": 2}),
        (GumbelAttention(AdditiveScore(5)), {"rows_per_caption": 2}),
        (HardAttention(AdditiveScore(5)), {"estimator": LeaveOneOut(2)}),
        (SoftAttention(AdditiveScore(5)), {"rows_per_caption": 2, "output": MarginalOutput()}),
    ],
)
def test_objective_adds_the_divergence_of_the_rows_it_decodes(attention, options):
    captioner, batch = make_captioner(attention, options.pop("output", None)), make_batch()
    with_it = Objective(attention, r_drop=0.7, **options)
    _, terms, output = with_it(captioner, batch)
    rows = with_it.rows_per_caption
    assert len(output.mask) == B * rows
    expected = plain_divergences(output.logits.detach(), rows)
    words = sum(len(caption) for caption in expected)
    assert float(terms["r_drop"]) == pytest.approx(sum(map(sum, expected)) / words, abs=1e-5) and terms["r_drop"] > 0
    without = float(terms["nll"] + with_it.attention_penalty * terms["attention_penalty"])
    if output.selection_log_probs is not None:
        entropy = losses.step_entropy(output.trace.alphas).sum() / output.mask.sum()
        without -= with_it.entropy_weight * float(entropy.detach())
    assert float(terms["loss"]) == pytest.approx(without + 0.7 * float(terms["r_drop"]), abs=1e-5)


def test_divergence_has_the_gradient_of_finite_differences():
    mask = torch.tensor([[True, True], [True, True], [True, False], [True, False]])
    logits = torch.randn(6, V, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: losses.row_divergence(x, mask, 2), [logits])


def test_rows_without_dropout_do_not_diverge():
    attention = SoftAttention(AdditiveScore(5))
    captioner = make_captioner(attention, dropout=0.0)
    _, terms, _ = Objective(attention, rows_per_caption=2, r_drop=1.0)(captioner, make_batch())
    assert float(terms["r_drop"]) == pytest.approx(0, abs=1e-7)


def test_reduction_of_the_authors_sums_over_words():
    attention, batch = SoftAttention(AdditiveScore(5)), make_batch()
    captioner = make_captioner(attention)
    found = []
    for reduction in (None, ArcticReduction()):
        torch.manual_seed(1)
        _, terms, _ = Objective(attention, rows_per_caption=2, r_drop=1.0, reduction=reduction)(captioner, batch)
        found.append(float(terms["r_drop"]))
    assert found[1] == pytest.approx(found[0] * sum(len(words) + 1 for words in WORDS), rel=1e-5)


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        (SoftAttention, {"r_drop": 1.0}, "set `rows_per_caption: 2`"),
        (HardAttention, {"r_drop": 1.0, "estimator": RewardToGo()}, "an estimator with `samples: 2`"),
        (HardAttention, {"rows_per_caption": 2}, "its estimator's `samples`"),
        (SoftAttention, {"rows_per_caption": 0}, "at least 1"),
        (SoftAttention, {"r_drop": -1.0}, "at least 0"),
    ],
)
def test_contradictions_are_refused(attention, options, message):
    with pytest.raises(InputError, match=message):
        Objective(attention(AdditiveScore(5)), **options)
