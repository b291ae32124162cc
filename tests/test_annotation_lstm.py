"""The bidirectional LSTM over the annotations, alone and as a stage of the decoder."""

from __future__ import annotations

import pytest
import torch

from captioning.attention import AdditiveScore, SoftAttention
from captioning.attention.layers import AnnotationLSTM
from captioning.data.batch import pad_captions
from captioning.model import AttentionDecoder

B, L, D, C, H, V = 3, 9, 7, 4, 10, 13


def make_lstm() -> AnnotationLSTM:
    lstm = AnnotationLSTM(C)
    assert lstm.build(D) == 2 * C
    return lstm


def make_decoder(**options) -> AttentionDecoder:
    decoder = AttentionDecoder(
        SoftAttention(AdditiveScore(6)),
        embedding_dim=5,
        hidden_dim=H,
        annotation_layer=AnnotationLSTM(C),
        **options,
    )
    decoder.build(V, D)
    return decoder.eval()


def one_direction(lstm: AnnotationLSTM, annotations: torch.Tensor, suffix: str) -> torch.Tensor:
    """An LSTM loop over annotations (L, D) in the order given; returns (L, C)."""
    W, U, b, d = (getattr(lstm.lstm, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    h, c, states = torch.zeros(C), torch.zeros(C), []
    for a in annotations:
        i, f, g, o = (W @ a + U @ h + b + d).chunk(4)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        states.append(h)
    return torch.stack(states)


@pytest.mark.parametrize("masked", [False, True])
def test_annotations_become_forward_and_backward_states_of_those_that_exist(masked):
    lstm, annotations = make_lstm(), torch.randn(B, L, D)
    mask = torch.rand(B, L) > 0.5 if masked else torch.ones(B, L, dtype=torch.bool)
    mask[:, 4] = True
    read = lstm(annotations, mask if masked else None)
    assert read.shape == (B, L, 2 * C)
    for b in range(B):
        exists = annotations[b, mask[b]]
        backward = one_direction(lstm, exists.flip(0), "_reverse").flip(0)
        torch.testing.assert_close(read[b, mask[b]], torch.cat([one_direction(lstm, exists, ""), backward], dim=1))
        assert (read[b, ~mask[b]] == 0).all()


def test_absent_locations_do_not_influence_the_decoder():
    decoder = make_decoder()
    annotations, mask = torch.randn(B, L, D), torch.ones(B, L, dtype=torch.bool)
    mask[:, [0, 5]] = False
    other = annotations.masked_fill(~mask.unsqueeze(-1), 50.0)
    captions, lengths = pad_captions([[4, 5], [6], [7, 8, 9]])
    outputs = [decoder(captions, lengths, decoder.encode(each, mask)) for each in (annotations, other)]
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits)
    assert (outputs[0].trace.alphas[:, :, [0, 5]] == 0).all()


def test_decoder_attends_to_what_the_lstm_returns_and_trains_it():
    decoder = make_decoder(standardize_annotations=True).train()
    annotations = torch.randn(B, L, D)
    memory = decoder.encode(annotations)
    assert memory.annotations.shape == (B, L, 2 * C) and decoder.annotation_dim == D
    captions, lengths = pad_captions([[4, 5], [6], [7, 8, 9]])
    decoder(captions, lengths, memory).logits.logsumexp(-1).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in decoder.annotation_layer.parameters())


def test_stage_works_under_autocast_also_with_a_mask():
    lstm, annotations = make_lstm(), torch.randn(B, L, D)
    mask = torch.rand(B, L) > 0.3
    mask[:, 1] = True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        read = lstm(annotations.bfloat16(), mask)
    torch.testing.assert_close(read.float(), lstm(annotations, mask), atol=0.05, rtol=0)


def test_config_round_trip_keeps_the_stage():
    decoder = make_decoder()
    again = AttentionDecoder.from_config(decoder.to_config())
    again.build(V, D)
    again.load_state_dict(decoder.state_dict())
    assert again.annotation_layer.hidden_dim == C


def test_weights_and_arguments_of_earlier_versions_load_under_the_layers_name():
    """Earlier ones had no other layer, and called it ``annotation_lstm``."""
    decoder = make_decoder()
    config, weights = decoder.to_config(), decoder.state_dict()
    config["init_args"]["annotation_lstm"] = config["init_args"].pop("annotation_layer")
    weights = {
        f"decoder.{name.replace('annotation_layer', 'annotation_lstm')}": value for name, value in weights.items()
    }
    assert any("annotation_lstm" in name for name in weights)
    again = AttentionDecoder.from_config(config)
    again.build(V, D)
    torch.nn.ModuleDict({"decoder": again}).load_state_dict(weights)  # not at the root, as in a captioner
    annotations = torch.randn(B, L, D)
    assert torch.equal(again.eval().encode(annotations).annotations, decoder.encode(annotations).annotations)
