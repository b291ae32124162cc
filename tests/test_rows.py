"""Rows of a caption: what they share is computed once, and they are what captions decoded apart would be."""

from __future__ import annotations

import pytest
import torch

from captioning.attention import (
    AdditiveScore,
    CoverageScore,
    GumbelAttention,
    HardAttention,
    MultiHeadAttention,
    ScaledDotScore,
    Score,
    SoftAttention,
)
from captioning.data.batch import pad_captions
from captioning.model import AttentionDecoder, MarginalOutput, TransformerDecoder

B, L, D, H, V, ROWS = 3, 9, 6, 7, 11, 2
WORDS = [[4, 5, 6, 7], [8, 9], [10, 4, 5]]


class DroppingScore(AdditiveScore):
    """A score of somebody's own that drops units of the query."""

    deterministic = False

    def forward(self, query, projected):
        return super().forward(torch.nn.functional.dropout(query, 0.5), projected)


def soft(**options):
    return SoftAttention(AdditiveScore(5), **options)


def build(decoder):
    torch.manual_seed(0)
    decoder.build(V, D, (3, 3))
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return decoder.train()


def lstm(attention, **options):
    return build(AttentionDecoder(attention, embedding_dim=5, hidden_dim=H, **options))


def forced(decoder, rows: int, times: int, inputs: bool = False):
    """Teacher forcing of captions, each ``times`` times in the batch, and the gradients of a sum of all it returns."""
    torch.manual_seed(1)
    captions, lengths = (part.repeat_interleave(times, 0) for part in pad_captions(WORDS))
    annotations = torch.randn(B, L, D)
    fed = captions[:, :-1].clamp(max=6) if inputs else None
    output = decoder(captions, lengths, decoder.encode(annotations), fed, rows)
    weights = torch.linspace(-1, 1, output.logits.numel()).view_as(output.logits)
    loss = (output.logits * weights).sum() + (output.trace.alphas**2).sum()
    if output.selection_log_probs is not None:
        loss = loss + output.selection_log_probs.sum()
    decoder.zero_grad()
    loss.backward()
    return output, {name: parameter.grad for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize(
    "make",
    [
        lambda: lstm(soft()),
        lambda: lstm(soft(), output=MarginalOutput()),
        lambda: lstm(soft(), gated=False, init_layers=2),
        lambda: lstm(soft(dropout=0.3)),
        lambda: lstm(soft(), recurrent_dropout=0.4),
        lambda: lstm(SoftAttention(CoverageScore(5))),
        lambda: lstm(SoftAttention(DroppingScore(5))),
        lambda: lstm(HardAttention(AdditiveScore(5), sample_probability=1.0)),
        lambda: lstm(HardAttention(AdditiveScore(5), dropout=0.3)),
        lambda: lstm(HardAttention(AdditiveScore(5), sample_probability=0.0), dropout=0.0),
        lambda: lstm(GumbelAttention(AdditiveScore(5))),
        lambda: lstm(MultiHeadAttention(ScaledDotScore(), heads=2)),
        lambda: build(
            TransformerDecoder(MultiHeadAttention(ScaledDotScore(), heads=2), dim=8, layers=2, heads=2, dropout=0.3)
        ),
    ],
)
@pytest.mark.parametrize("inputs", [False, True])
def test_rows_are_what_captions_decoded_apart_would_be(make, inputs):
    (output, gradients), (apart, gradients_) = (forced(make(), *how, inputs) for how in ((ROWS, 1), (1, ROWS)))
    assert torch.equal(output.mask, apart.mask) and torch.equal(output.targets, apart.targets)
    torch.testing.assert_close(output.logits, apart.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.trace.alphas, apart.trace.alphas, atol=1e-5, rtol=1e-5)
    assert torch.equal(output.trace.locations, apart.trace.locations)
    torch.testing.assert_close(output.selection_log_probs, apart.selection_log_probs)
    torch.testing.assert_close(gradients, gradients_, atol=1e-4, rtol=1e-4)


def rows_attended(decoder, monkeypatch) -> list[int]:
    """The number of rows of every step that will be taken."""
    seen, attend = [], decoder.attention.forward
    monkeypatch.setattr(decoder.attention, "forward", lambda h, *rest: (seen.append(len(h)), attend(h, *rest))[1])
    return seen


def draw_of_each_row(alphas):
    """Locations (B, R) of alphas (B, R, L) by no random number, others for a caption's first row and its second."""
    preferred = torch.tensor([[1.0, 1, 1, 9, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 9, 1]])
    return (alphas * preferred.repeat(-(-alphas.shape[1] // ROWS), 1)[: alphas.shape[1]]).argmax(-1)


@pytest.mark.parametrize("expected", [[True, False, False], [True, False, True], [True] * 3, [False] * 3])
@pytest.mark.parametrize("score", [AdditiveScore, CoverageScore])
def test_images_whose_context_is_the_expectation_take_their_steps_once(score, expected, monkeypatch):
    monkeypatch.setattr("captioning.attention.hard.draw", draw_of_each_row)
    chosen = torch.tensor([0.9 if each else 0.1 for each in expected])
    found = {}
    for how in ((ROWS, 1), (1, ROWS)):
        decoder = lstm(HardAttention(score(5)), dropout=0.0, init_layers=2)
        monkeypatch.setattr(torch, "rand", lambda *_, **__: chosen)
        seen = rows_attended(decoder, monkeypatch)
        found[how] = (*forced(decoder, *how), sum(seen))
    (output, gradients, rows), (apart, gradients_, rows_apart) = found.values()
    steps = output.mask.shape[1]
    assert rows_apart == steps * B * ROWS and rows == steps * (B * ROWS - sum(expected))
    assert (output.trace.locations == -1).sum() == steps * ROWS * sum(expected)
    assert torch.equal(output.trace.locations, apart.trace.locations)
    torch.testing.assert_close(output.logits, apart.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.trace.alphas, apart.trace.alphas, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.selection_log_probs, apart.selection_log_probs)
    torch.testing.assert_close(gradients, gradients_, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("attention", "options", "recurrences"),
    [
        (lambda: soft(), {}, 1),
        (lambda: HardAttention(AdditiveScore(5), ramp=(10, 20)), {}, 1),  # before the ramp nothing is drawn
        (lambda: HardAttention(AdditiveScore(5), ramp=(10, 20), dropout=0.3), {}, ROWS),
        (lambda: HardAttention(AdditiveScore(5), sample_probability=1.0), {}, ROWS),
        (lambda: soft(dropout=0.3), {}, ROWS),
        (lambda: soft(), {"recurrent_dropout": 0.3}, ROWS),
        (lambda: SoftAttention(DroppingScore(5)), {}, ROWS),
    ],
)
def test_rows_share_a_recurrence_where_they_cannot_differ_in_it(attention, options, recurrences, monkeypatch):
    decoder = lstm(attention(), **options)
    seen = rows_attended(decoder, monkeypatch)
    forced(decoder, ROWS, 1)
    assert set(seen) == {B * recurrences}


def test_every_row_has_dropout_of_its_own():
    output, _ = forced(lstm(soft()), ROWS, 1)
    first, second = (output.logits[output.mask.flatten().nonzero().flatten() // 5 % ROWS == row] for row in range(ROWS))
    assert (first - second).abs().max() > 0.1


def test_a_score_that_says_nothing_of_itself_gets_rows_of_its_own():
    assert not Score.deterministic
