"""Samples of a caption equal captions that are decoded apart, and share a recurrence where nothing is drawn in it."""

import pytest
import torch
from helpers_models import draw_weights

from captioning.attention import (
    AdditiveScore,
    CoverageScore,
    GumbelAttention,
    HardAttention,
    MultiHeadAttention,
    NTMAttention,
    ScaledDotScore,
    SoftAttention,
)
from captioning.data.batch import pad_captions
from captioning.model import AttentionDecoder, SummedOutput, TransformerDecoder

B, L, D, H, V, SAMPLES = 3, 9, 6, 7, 11, 2
WORDS = [[4, 5, 6, 7], [8, 9], [10, 4, 5]]


class DroppingAttention(SoftAttention):
    """An attention of the user that drops units of the query."""

    samples_share_contexts = False

    def forward(self, query, *rest):
        return super().forward(torch.nn.functional.dropout(query, 0.5), *rest)


def soft(**options):
    return SoftAttention(AdditiveScore(5), **options)


def build(decoder):
    torch.manual_seed(0)
    decoder.build(V, D, (3, 3))
    return draw_weights(decoder, std=0.6).train()


def lstm(attention, **options):
    attention.progress = 0.0
    return build(AttentionDecoder(attention, embedding_dim=5, hidden_dim=H, **options))


def forced(decoder, samples: int, times: int):
    """Teacher-force captions, each ``times`` times in the batch; return the output and gradients of a sum of it."""
    torch.manual_seed(1)
    captions, lengths = (tensor.repeat_interleave(times, 0) for tensor in pad_captions(WORDS))
    annotations = torch.randn(B, L, D)
    output = decoder(captions, lengths, decoder.encode(annotations), samples)
    weights = torch.linspace(-1, 1, output.logits.numel()).view_as(output.logits)
    loss = (output.logits * weights).sum() + (output.trace.alphas**2).sum()
    if output.location_log_prob is not None:
        loss = loss + output.location_log_prob.sum()
    decoder.zero_grad()
    loss.backward()
    return output, {name: parameter.grad for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize(
    "make",
    [
        lambda: lstm(soft()),
        lambda: lstm(soft(), output=SummedOutput()),
        lambda: lstm(soft(), gated=False, init_layers=2),
        lambda: lstm(soft(dropout=0.3)),
        lambda: lstm(SoftAttention(CoverageScore(5))),
        lambda: lstm(NTMAttention(AdditiveScore(5))),
        lambda: lstm(DroppingAttention(AdditiveScore(5))),
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
def test_samples_equal_captions_decoded_apart(make):
    (output, gradients), (apart, gradients_) = forced(make(), SAMPLES, 1), forced(make(), 1, SAMPLES)
    assert torch.equal(output.mask, apart.mask) and torch.equal(output.targets, apart.targets)
    torch.testing.assert_close(output.logits, apart.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.trace.alphas, apart.trace.alphas, atol=1e-5, rtol=1e-5)
    assert torch.equal(output.trace.locations, apart.trace.locations)
    torch.testing.assert_close(output.location_log_prob, apart.location_log_prob)
    torch.testing.assert_close(gradients, gradients_, atol=1e-4, rtol=1e-4)


def rows_attended(decoder, monkeypatch) -> list[int]:
    """Return a list to which every step adds its number of rows."""
    seen, attend = [], decoder.attention.forward
    monkeypatch.setattr(decoder.attention, "forward", lambda h, *rest: (seen.append(len(h)), attend(h, *rest))[1])
    return seen


@pytest.mark.parametrize(
    ("attention", "recurrences"),
    [
        (lambda: soft(), 1),
        (lambda: HardAttention(AdditiveScore(5), ramp=(0.5, 1)), 1),  # before the ramp nothing is drawn
        (lambda: HardAttention(AdditiveScore(5), ramp=(0.5, 1), dropout=0.3), SAMPLES),
        (lambda: HardAttention(AdditiveScore(5), sample_probability=1.0), SAMPLES),
        (lambda: soft(dropout=0.3), SAMPLES),
        (lambda: MultiHeadAttention(ScaledDotScore(), heads=2), 1),
        (lambda: MultiHeadAttention(ScaledDotScore(), heads=2, dropout=0.3), SAMPLES),
        (lambda: DroppingAttention(AdditiveScore(5)), SAMPLES),
        (lambda: NTMAttention(AdditiveScore(5)), 1),
    ],
)
def test_samples_share_a_recurrence_that_is_deterministic(attention, recurrences, monkeypatch):
    decoder = lstm(attention())
    decoder.attention.progress = 0.0
    seen = rows_attended(decoder, monkeypatch)
    forced(decoder, SAMPLES, 1)
    assert max(seen) == B * recurrences  # before images leave whose captions have ended
