"""The decoder against a NumPy loop written from the paper's equations, and what padding and masks must not change."""

import numpy as np
import pytest
import torch
from helpers_models import draw_weights

from captioning.attention import AdditiveScore, Attention, SoftAttention, UniformAttention
from captioning.data.batch import pad_captions
from captioning.model import AttentionDecoder
from captioning.vocabulary import START

B, T, L, D, A, E, H, V = 2, 5, 9, 7, 6, 8, 10, 13


def make_decoder(attention: Attention | None = None, **options) -> AttentionDecoder:
    decoder = AttentionDecoder(
        attention or SoftAttention(AdditiveScore(A)), embedding_dim=E, hidden_dim=H, dropout=0.5, **options
    )
    decoder.build(V, D, (1, L))
    return draw_weights(decoder, std=0.4).eval()


def make_captions(words: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return pad_captions([torch.randint(4, V, (n,)).tolist() for n in words])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def numpy_decoder(weights: dict[str, np.ndarray], annotations, captions, steps, init_layers=1, mask=None):
    """One caption, one word, one location at a time, in float64: Eq. 1-7, 13 and Sec. 3.1.2, 4.2.1."""
    W = {name: value.astype(np.float64) for name, value in weights.items()}
    L = len(annotations)
    exists = np.ones(L, bool) if mask is None else mask

    def initial(name):
        x = annotations[exists].mean(axis=0)
        for layer in range(init_layers - 1):
            x = np.maximum(W[f"{name}.layers.{layer}.0.weight"] @ x + W[f"{name}.layers.{layer}.0.bias"], 0)
        last = init_layers - 1
        return np.tanh(W[f"{name}.layers.{last}.weight"] @ x + W[f"{name}.layers.{last}.bias"])

    h, c = initial("init_h"), initial("init_c")
    logits, alphas, betas = [], [], []
    for t in range(steps):
        embedded = W["embedding.weight"][captions[t]]
        e = np.full(L, -np.inf)
        for i in range(L):
            if exists[i]:
                hidden = (
                    W["attention.score.annotation_projection.weight"] @ annotations[i]
                    + W["attention.score.annotation_projection.bias"]
                    + W["attention.score.query_projection.weight"] @ h
                )
                e[i] = W["attention.score.output.weight"][0] @ np.tanh(hidden)  # Eq. 4
        alpha = np.exp(e - e.max()) / np.exp(e - e.max()).sum()  # Eq. 5
        z = sum(alpha[i] * annotations[i] for i in range(L) if exists[i])  # Eq. 13
        beta = sigmoid(W["gate.f_beta.weight"][0] @ h + W["gate.f_beta.bias"][0])
        z = beta * z
        gates = (
            W["word_to_gates.weight"] @ embedded
            + W["word_to_gates.bias"]
            + W["hidden_to_gates.weight"] @ h
            + W["context_to_gates.weight"] @ z
        )
        i_gate, f_gate, o_gate, g = np.split(gates, 4)  # Eq. 1
        c = sigmoid(f_gate) * c + sigmoid(i_gate) * np.tanh(g)  # Eq. 2
        h = sigmoid(o_gate) * np.tanh(c)  # Eq. 3
        hidden = embedded + W["output.L_h.weight"] @ h + W["output.L_z.weight"] @ z
        logits.append(W["output.L_o.weight"] @ hidden + W["output.L_o.bias"])  # Eq. 7
        alphas.append(alpha)
        betas.append(beta)
    return np.array(logits), np.array(alphas), np.array(betas)


@pytest.mark.parametrize("init_layers", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_decoder_equals_a_numpy_loop_over_the_equations(init_layers, masked):
    decoder = make_decoder(init_layers=init_layers)
    annotations = torch.randn(B, L, D)
    mask = torch.rand(B, L) > 0.4 if masked else None
    captions, lengths = make_captions([4, 2])
    output = decoder(captions, lengths, decoder.encode(annotations, mask))
    weights = {name: value.numpy() for name, value in decoder.state_dict().items()}
    row = 0
    for b in range(B):
        steps = int(lengths[b])
        logits, alphas, betas = numpy_decoder(
            weights,
            annotations[b].double().numpy(),
            captions[b].tolist(),
            steps,
            init_layers,
            None if mask is None else mask[b].numpy(),
        )
        np.testing.assert_allclose(output.logits[row : row + steps].detach().numpy(), logits, atol=1e-5)
        np.testing.assert_allclose(output.trace.alphas[b, :steps].detach().numpy(), alphas, atol=1e-5)
        np.testing.assert_allclose(output.trace.betas[b, :steps].detach().numpy(), betas, atol=1e-5)
        row += steps
    assert row == len(output.logits)


def test_teacher_forcing_equals_step_by_step():
    decoder = make_decoder()
    memory = decoder.encode(torch.randn(B, L, D))
    captions, lengths = make_captions([4, 4])
    output = decoder(captions, lengths, memory)
    state = decoder.init_state(memory)
    for t in range(5):
        logits, state, trace = decoder.step(captions[:, t], state, memory)
        torch.testing.assert_close(logits, output.logits.view(B, T, V)[:, t])
        torch.testing.assert_close(trace.alphas, output.trace.alphas[:, t])


def test_padding_changes_neither_logits_nor_alphas():
    decoder = make_decoder()
    memory = decoder.encode(torch.randn(B, L, D))
    captions, lengths = make_captions([3, 3])
    padded = torch.nn.functional.pad(captions, (0, 2))
    plain, longer = decoder(captions, lengths, memory), decoder(padded, lengths, memory)
    torch.testing.assert_close(plain.logits, longer.logits)
    torch.testing.assert_close(plain.trace.alphas, longer.trace.alphas[:, :4])
    assert (longer.trace.alphas[:, 4:] == 0).all() and (longer.trace.betas[:, 4:] == 0).all()


def test_masked_locations_get_exactly_zero_and_do_not_influence_the_output():
    decoder = make_decoder()
    annotations, mask = torch.randn(B, L, D), torch.ones(B, L, dtype=torch.bool)
    mask[:, [2, 5]] = False
    captions, lengths = make_captions([4, 3])
    output = decoder(captions, lengths, decoder.encode(annotations, mask))
    assert (output.trace.alphas[:, :, [2, 5]] == 0).all()
    other = annotations.clone()
    other[:, [2, 5]] = 100.0
    torch.testing.assert_close(output.logits, decoder(captions, lengths, decoder.encode(other, mask)).logits)


def test_alphas_sum_to_one_over_locations_at_existing_steps():
    decoder = make_decoder()
    captions, lengths = make_captions([4, 2])
    output = decoder(captions, lengths, decoder.encode(torch.randn(B, L, D)))
    torch.testing.assert_close(output.trace.alphas.sum(-1), output.mask.float())


@pytest.mark.parametrize("attention", [SoftAttention(AdditiveScore(A)), UniformAttention()])
def test_rows_of_one_image_share_its_memory(attention):
    """Three rows per image equal one row of each of three copies of the image."""
    decoder = make_decoder(attention)
    annotations = torch.randn(B, L, D)
    tokens = torch.randint(4, V, (B * 3,))
    state = (torch.randn(B * 3, H), torch.randn(B * 3, H))
    shared, _, trace = decoder.step(tokens, state, decoder.encode(annotations))
    copied, _, copied_trace = decoder.step(tokens, state, decoder.encode(annotations.repeat_interleave(3, 0)))
    torch.testing.assert_close(shared, copied)
    torch.testing.assert_close(trace.alphas, copied_trace.alphas)


def test_standardizing_gives_channels_of_mean_zero_and_variance_one_and_leaves_masked_locations_out():
    decoder = make_decoder(standardize_annotations=True).train()
    annotations = 5 + 3 * torch.randn(40, L, D)
    mask = torch.ones(40, L, dtype=torch.bool)
    mask[:, 0] = False
    annotations[:, 0] = 1000.0
    seen = decoder.encode(annotations, mask).annotations[mask]
    torch.testing.assert_close(seen.mean(0), torch.zeros(D), atol=1e-4, rtol=0)
    torch.testing.assert_close(seen.var(0, unbiased=False), torch.ones(D), atol=1e-3, rtol=0)


def test_gradients_match_finite_differences():
    decoder = make_decoder().double()
    captions, lengths = make_captions([2, 1])

    def loss(annotations):
        output = decoder(captions, lengths, decoder.encode(annotations))
        return output.logits.pow(2).sum() + output.trace.alphas.pow(3).sum() + output.trace.betas.sum()

    torch.autograd.gradcheck(loss, torch.randn(B, 4, D, dtype=torch.double, requires_grad=True))


def test_wrong_shapes_are_refused_by_name():
    decoder = make_decoder()
    memory = decoder.encode(torch.randn(B, L, D))
    with pytest.raises(ValueError, match=r"captions must be \(N, T\+1\)"):
        decoder(torch.full((3,), START), torch.tensor([1]), memory)
    with pytest.raises(ValueError, match="annotation mask must be"):
        decoder.encode(torch.randn(B, L, D), torch.ones(B, L + 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="at least one location"):
        decoder.encode(torch.randn(B, L, D), torch.zeros(B, L, dtype=torch.bool))
