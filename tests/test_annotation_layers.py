"""The layers over the annotations: self-attention and LSTM against loops, and both in the decoder."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from captioning.attention import AdditiveScore, AnnotationAttention, AnnotationLSTM, SoftAttention
from captioning.attention.layers import AnnotationLayer
from captioning.data.batch import pad_captions
from captioning.model import AttentionDecoder

B, GRID, D, DIM, HEADS, F, C, H, V = 3, (2, 5), 7, 12, 3, 9, 4, 10, 13
L = GRID[0] * GRID[1]


def make_layer() -> AnnotationAttention:
    layer = AnnotationAttention(dim=DIM, heads=HEADS, layers=2, feedforward_dim=F)
    assert layer.build(D, GRID) == DIM
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0, 0.5)
    return layer.eval()


def make_mask() -> torch.Tensor:
    mask = torch.rand(B, L) > 0.5
    mask[:, 4] = True
    return mask


def layer_norm(x: np.ndarray, norm) -> np.ndarray:
    x = x - x.mean(1, keepdims=True)
    return x / np.sqrt((x**2).mean(1, keepdims=True) + norm.eps) * numpy(norm.weight) + numpy(norm.bias)


def numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def by_hand(layer: AnnotationAttention, annotations: torch.Tensor, locations: list[int]) -> np.ndarray:
    """One image, the locations that exist: (n, DIM)."""
    x = numpy(annotations)[locations] @ numpy(layer.projection.weight).T + numpy(layer.projection.bias)
    x = x + np.array([position(*divmod(i, GRID[1])) for i in locations])
    for block in layer.layers.layers:
        y = layer_norm(x, block.norm1)
        queries, keys, values = np.split(
            y @ numpy(block.self_attn.in_proj_weight).T + numpy(block.self_attn.in_proj_bias), 3, axis=1
        )
        read = np.zeros_like(x)
        size = DIM // HEADS
        for head in range(HEADS):
            own = slice(head * size, (head + 1) * size)
            for i in range(len(x)):
                e = np.exp([queries[i, own] @ keys[j, own] / math.sqrt(size) for j in range(len(x))])
                read[i, own] = sum(w * values[j, own] for j, w in enumerate(e / e.sum()))
        x = x + read @ numpy(block.self_attn.out_proj.weight).T + numpy(block.self_attn.out_proj.bias)
        y = layer_norm(x, block.norm2)
        y = np.maximum(y @ numpy(block.linear1.weight).T + numpy(block.linear1.bias), 0)
        x = x + y @ numpy(block.linear2.weight).T + numpy(block.linear2.bias)
    return layer_norm(x, layer.layers.norm)


def position(row: int, column: int) -> list[float]:
    encoding = []
    for position in (row, column):
        angles = [position / 10_000 ** (k / (DIM // 4)) for k in range(DIM // 4)]
        encoding += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    return encoding


@pytest.mark.parametrize("masked", [False, True])
def test_self_attention_equals_a_loop_over_the_locations_that_exist(masked):
    layer, annotations = make_layer(), torch.randn(B, L, D)
    mask = make_mask() if masked else torch.ones(B, L, dtype=torch.bool)
    for mode in (torch.no_grad, torch.enable_grad):  # PyTorch has a kernel of its own where nothing is trained
        with mode():
            read = layer(annotations, mask if masked else None)
        assert read.shape == (B, L, DIM)
        for b in range(B):
            expected = by_hand(layer, annotations[b], mask[b].nonzero().flatten().tolist())
            np.testing.assert_allclose(numpy(read[b, mask[b]]), expected, atol=1e-4)
            assert (read[b, ~mask[b]] == 0).all()


# The bidirectional LSTM


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
def test_lstm_states_equal_a_loop_over_the_locations_that_exist(masked):
    lstm, annotations = AnnotationLSTM(C), torch.randn(B, L, D)
    assert lstm.build(D, GRID) == 2 * C
    mask = make_mask() if masked else torch.ones(B, L, dtype=torch.bool)
    read = lstm(annotations, mask if masked else None)
    assert read.shape == (B, L, 2 * C)
    for b in range(B):
        exists = annotations[b, mask[b]]
        backward = one_direction(lstm, exists.flip(0), "_reverse").flip(0)
        torch.testing.assert_close(read[b, mask[b]], torch.cat([one_direction(lstm, exists, ""), backward], dim=1))
        assert (read[b, ~mask[b]] == 0).all()


# In the decoder

LAYERS = {
    "attention": lambda: AnnotationAttention(dim=DIM, heads=HEADS),
    "LSTM": lambda: AnnotationLSTM(C),
}
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def make_decoder(make: Callable[[], AnnotationLayer], **options) -> AttentionDecoder:
    decoder = AttentionDecoder(
        SoftAttention(AdditiveScore(6)), embedding_dim=5, hidden_dim=H, annotation_layer=make(), **options
    )
    decoder.build(V, D, GRID)
    return decoder.eval()


def logits_sum(decoder: AttentionDecoder, annotations: torch.Tensor) -> torch.Tensor:
    captions, lengths = pad_captions([[4, 5], [6], [7, 8, 9]])
    return decoder(captions, lengths, decoder.encode(annotations)).logits.float().logsumexp(-1).sum()


@every_layer
def test_absent_locations_do_not_influence_the_decoder(make):
    decoder, annotations, mask = make_decoder(make), torch.randn(B, L, D), torch.ones(B, L, dtype=torch.bool)
    mask[:, [0, 5]] = False
    changed = annotations.masked_fill(~mask.unsqueeze(-1), 50.0)
    captions, lengths = pad_captions([[4, 5], [6], [7, 8, 9]])
    outputs = [decoder(captions, lengths, decoder.encode(x, mask)) for x in (annotations, changed)]
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits)
    assert (outputs[0].trace.alphas[:, :, [0, 5]] == 0).all()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["attention", "LSTM"])
def test_the_decoder_attends_to_the_output_of_the_layer_and_trains_it(name, autocast):
    decoder = make_decoder(LAYERS[name], standardize_annotations=True).train()
    assert decoder.annotation_dim == D
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        annotations = torch.randn(B, L, D).half()  # as a feature cache has them
        assert decoder.encode(annotations).annotations.shape == (B, L, {"attention": DIM, "LSTM": 2 * C}[name])
        logits_sum(decoder, annotations).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in decoder.annotation_layer.parameters())
