"""Posterior attention against a NumPy loop over captions, steps and locations, and its gradient against differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from captioning.attention import AdditiveScore, SoftAttention
from captioning.data.batch import CaptionBatch, pad_captions
from captioning.decoding import BeamOptions
from captioning.encoders import ConvEncoder
from captioning.errors import InputError
from captioning.model import MarginalOutput, PosteriorDecoder
from captioning.model.captioner import Captioner

B, D, A, E, H, V = 3, 5, 4, 6, 7, 13
GRID = (3, 4)
L = GRID[0] * GRID[1]
WORDS = ([4, 6, 5], [5], [7, 12])


def make_captioner(block=None, gated=True, dtype=torch.float64):
    decoder = PosteriorDecoder(
        SoftAttention(AdditiveScore(A)),
        embedding_dim=E,
        hidden_dim=H,
        dropout=0.0,
        gated=gated,
        output=MarginalOutput(block=block),
    )
    encoder = ConvEncoder((D,), (4,), image_size=16)
    encoder.grid_size = GRID
    captioner = Captioner(encoder, decoder, vocabulary_size=V)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return captioner.eval().to(dtype)


def make_batch():
    captions, lengths = pad_captions([*WORDS])
    images = torch.arange(B)
    annotations = torch.randn(B, L, D, dtype=torch.float64)
    return CaptionBatch(captions, lengths, images, images, images, annotations=annotations)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def cell(gates, c):
    i, f, o, g = np.split(gates, 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def enumerated(captioner, batch, block):
    """Return log p of every word at all steps (M, V), one caption, step and component after the other."""
    decoder = captioner.decoder
    W = {name: value.detach().numpy() for name, value in decoder.state_dict().items()}
    memory = captioner.encode(annotations=batch.annotations)
    row, column = np.divmod(np.arange(L), GRID[1])
    blocks = np.arange(L) if block is None else row // block[0] * (GRID[1] // block[1]) + column // block[1]
    rows = []
    for n, words in enumerate(WORDS):
        one = memory.select(torch.tensor([n]))
        a = one.annotations[0].detach().numpy()
        means = np.array([a[blocks == k].mean(0) for k in range(blocks.max() + 1)])
        h, c = (x[0].detach().numpy() for x in decoder.init_state(one)[:2])
        for token, word in zip([1, *words], [*words, 2], strict=True):
            looked = decoder.attention(torch.from_numpy(h).unsqueeze(0), one, ())
            alpha = looked.alphas[0].detach().numpy()
            beta = sigmoid(W["gate.f_beta.weight"][0] @ h + W["gate.f_beta.bias"][0]) if decoder.gated else 1.0
            embedded = W["embedding.weight"][token]
            fixed = (W["word_to_gates.weight"] @ embedded + W["word_to_gates.bias"]) + W["hidden_to_gates.weight"] @ h
            h_prior, _ = cell(fixed + W["context_to_gates.weight"] @ (beta * (alpha @ a)), c)
            joint = np.zeros((len(means) + 1, V))
            for k in range(len(means) + 1):
                hidden = embedded + W["output.L_h.weight"] @ h_prior
                hidden = hidden if k == 0 else hidden + W["output.L_z.weight"] @ means[k - 1]
                logits = W["output.L_o.weight"] @ hidden + W["output.L_o.bias"]
                weight = 1 - beta if k == 0 else beta * alpha[blocks == k - 1].sum()
                joint[k] = weight * np.exp(logits) / np.exp(logits).sum()
            rows.append(np.log(joint.sum(0)))
            posterior = joint[:, word] / joint[:, word].sum()
            context = np.zeros(D)
            for i in range(L):
                k = blocks[i]
                context += posterior[k + 1] * alpha[i] / alpha[blocks == k].sum() * a[i]
            h, c = cell(fixed + W["context_to_gates.weight"] @ context, c)
    return torch.from_numpy(np.array(rows))


@pytest.mark.parametrize("block", [None, (1, 2)])
@pytest.mark.parametrize("gated", [True, False])
def test_words_and_states_are_those_of_the_enumeration(block, gated):
    captioner, batch = make_captioner(block, gated), make_batch()
    assert batch.captions[0, :2].tolist() == [1, 4]
    given = captioner(batch).logits
    torch.testing.assert_close(given, enumerated(captioner, batch, block), atol=1e-9, rtol=1e-9)


def test_the_steps_of_a_search_are_those_of_teacher_forcing():
    captioner, batch = make_captioner((1, 2)), make_batch()
    decoder = captioner.decoder
    expected, start = captioner(batch), 0
    for n, words in enumerate(WORDS):
        memory = decoder.prepare_search(captioner.encode(annotations=batch.annotations).select(torch.tensor([n])))
        state = decoder.init_state(memory)
        for token in batch.captions[n, : len(words) + 1]:
            log_probs, state, _ = decoder.step(token.view(1), state, memory)
            torch.testing.assert_close(log_probs[0], expected.logits[start], atol=1e-9, rtol=1e-9)
            start += 1


def test_the_gradient_passes_through_the_posterior():
    captioner, batch = make_captioner((1, 2)), make_batch()
    captioner.train()
    parameters = dict(captioner.decoder.named_parameters())
    for name in ("output.L_z.weight", "output.L_o.bias", "hidden_to_gates.weight", "gate.f_beta.weight"):
        parameter = parameters[name]

        def loss():
            output = captioner(batch)
            return output.logits.gather(1, output.targets.unsqueeze(1)).sum()

        captioner.zero_grad()
        loss().backward()
        for index in (0, parameter.numel() // 2, parameter.numel() - 1):
            flat = parameter.data.view(-1)
            value, ends = flat[index].item(), []
            for shift in (1e-6, -1e-6):
                flat[index] = value + shift
                ends.append(loss().item())
            flat[index] = value
            difference = (ends[0] - ends[1]) / 2e-6
            assert parameter.grad.view(-1)[index].item() == pytest.approx(difference, rel=1e-5, abs=1e-7), name


def test_a_search_runs_in_float32_and_autocast():
    captioner, batch = make_captioner((1, 2), dtype=torch.float32), make_batch()
    memory = captioner.encode(annotations=batch.annotations.float())
    with torch.no_grad():
        assert captioner.search(memory, BeamOptions(beam_size=3, max_length=6))
    with torch.autocast("cpu", torch.bfloat16):
        batch = batch.__class__(**{**vars(batch), "annotations": batch.annotations.float()})
        captioner.train()
        captioner(batch).logits.sum().backward()


def test_another_output_is_refused():
    with pytest.raises(InputError, match="MarginalOutput"):
        PosteriorDecoder(SoftAttention(AdditiveScore(A))).build(V, D)
