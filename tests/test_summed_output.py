"""The summed output in the decoder: its likelihood against NumPy, its gradient against differences, and its uses."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers_models import batch_of, captioner_of

from captioning.attention import (
    AdditiveScore,
    Attention,
    Entmax15,
    GumbelAttention,
    HardAttention,
    MultiHeadAttention,
    NTMAttention,
    ScaledDotScore,
    SoftAttention,
    Sparsemax,
)
from captioning.data.batch import CaptionBatch
from captioning.decoding import BeamOptions
from captioning.errors import InputError
from captioning.model import AttentionDecoder, SummedOutput
from captioning.model.captioner import Captioner
from captioning.objective import Likelihood, reductions
from captioning.vocabulary import END

B, D, A, E, H, V = 3, 5, 4, 6, 7, 13
GRID = (3, 4)
L = GRID[0] * GRID[1]
WORDS = ([4, 6, 5], [5], [7, 12])


def make_captioner(attention=None, *, std=0.7, dropout=0.0, **options):
    attention = attention or SoftAttention(AdditiveScore(A))
    decoder = AttentionDecoder(
        attention, embedding_dim=E, hidden_dim=H, dropout=dropout, output=SummedOutput(), **options
    )
    return captioner_of(decoder, D, V, std, grid_size=GRID).eval()


def make_batch(*, mask=None, dtype=torch.float32) -> CaptionBatch:
    return batch_of(WORDS, torch.randn(B, L, D, dtype=dtype), mask)


def some_mask() -> torch.Tensor:
    mask = torch.rand(B, L) > 0.3
    mask[0, :2], mask[0, 4:6] = False, False
    mask[:, 3] = True
    return mask


def log_likelihoods(captioner: Captioner, batch: CaptionBatch) -> list[tuple[np.ndarray, np.ndarray]]:
    """(log w (T, L + 1), log p(words | location) (T, L + 1, V)) of every caption in float64, one step at a time.

    The recurrence, h and alphas, is the decoder's own, which test_decoder.py verifies.
    """
    decoder = captioner.decoder
    W = {name: value.detach().double().numpy() for name, value in decoder.state_dict().items()}
    memory = captioner.encode(annotations=batch.annotations, mask=batch.annotation_mask)
    a = memory.annotations.detach().double().numpy()
    captions = []
    for n, words in enumerate(WORDS):
        one = memory.select_images(torch.tensor([n]))
        state = decoder.init_state(one)
        log_w, log_p = [], []
        for token in batch.captions[n, : len(words) + 1]:
            embedded = decoder.embedding(token.view(1))
            state, step = decoder._recur(decoder.word_to_gates(embedded), state, one)
            h, alpha = step.h[0].detach().double().numpy(), step.alphas[0].detach().double().numpy()
            beta = 1.0 if step.beta_logit is None else float(torch.sigmoid(step.beta_logit[0]))
            s = W["embedding.weight"][int(token)] + W["output.L_h.weight"] @ h
            hidden = [s] + [s + W["output.L_z.weight"] @ annotation for annotation in a[n]]
            logits = np.array([W["output.L_o.weight"] @ x + W["output.L_o.bias"] for x in hidden])
            log_p.append(logits - np.log(np.exp(logits).sum(1, keepdims=True)))
            with np.errstate(divide="ignore"):
                log_w.append(np.log(np.array([1 - beta, *(beta * alpha)])))
        captions.append((np.array(log_w), np.array(log_p)))
    return captions


def summed_of(captioner: Captioner, batch: CaptionBatch) -> np.ndarray:
    """Return log p of every word at all steps of all captions, (M, V)."""
    captions = log_likelihoods(captioner, batch)
    return np.concatenate([np.logaddexp.reduce(log_w[:, :, None] + log_p, axis=1) for log_w, log_p in captions])


@pytest.mark.parametrize("masked", [False, True])
def test_likelihood_is_the_sum_over_locations(masked):
    captioner, batch = make_captioner(), make_batch(mask=some_mask() if masked else None)
    with torch.no_grad():
        output = captioner(batch)
        expected = summed_of(captioner, batch)
    np.testing.assert_allclose(output.logits.double().numpy(), expected, atol=2e-5)
    np.testing.assert_allclose(output.logits.exp().sum(1).numpy(), 1, atol=1e-5)


@pytest.mark.parametrize("normalizer", [None, Sparsemax(), Entmax15()], ids=["softmax", "sparsemax", "1.5-entmax"])
def test_gradient_of_the_objective_matches_finite_differences(normalizer):
    """Of the NLL and the penalty with respect to every parameter's first entries, in float64."""
    attention = SoftAttention(AdditiveScore(A), normalizer=normalizer)
    captioner = make_captioner(attention).double()
    batch = make_batch(mask=some_mask(), dtype=torch.double)
    objective = Likelihood(attention_penalty=0.3, label_smoothing=0.1).bind(captioner.decoder)
    parameters = list(captioner.decoder.parameters())
    exact = torch.autograd.grad(objective(captioner, batch)[0], parameters)
    for parameter, gradient in zip(parameters, exact, strict=True):
        flat = parameter.data.view(-1)
        for position in {0, flat.numel() // 2, flat.numel() - 1}:
            value = float(flat[position])
            around = []
            for step in (1e-5, -1e-5):
                flat[position] = value + step
                with torch.no_grad():
                    around.append(float(objective(captioner, batch)[0]))
            flat[position] = value
            assert float(gradient.view(-1)[position]) == pytest.approx((around[0] - around[1]) / 2e-5, abs=1e-7)


def with_attention(attention: Attention) -> AttentionDecoder:
    return AttentionDecoder(attention, output=SummedOutput())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: with_attention(HardAttention(AdditiveScore(A))), "HardAttention chooses locations itself"),
        (lambda: with_attention(GumbelAttention(AdditiveScore(A))), "GumbelAttention chooses locations itself"),
        (lambda: with_attention(MultiHeadAttention(ScaledDotScore(), heads=1)), "looks at several locations at once"),
        (lambda: with_attention(NTMAttention(AdditiveScore(A))), "NTMAttention .* writes over them"),
    ],
)
def test_options_that_do_not_fit_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_reinforce_bound_of_the_same_model_is_below_the_likelihood():
    """Eq. 10 summed over every path of locations: hard attention maximizes a lower bound."""
    captioner, batch = make_captioner(std=1.0), make_batch()
    with torch.no_grad():
        output = captioner(batch)
        likelihood = reductions.step_log_probs(output.logits, output.targets, output.mask).sum(1).double().numpy()
        caption_parts = log_likelihoods(captioner, batch)
    for n in (1, 2):  # captions of two and three steps: 13^2 and 13^3 paths
        log_w, log_p = caption_parts[n]
        targets = [*WORDS[n], END]
        steps = range(len(targets))
        rewards = np.array([log_p[t, :, targets[t]] for t in steps])  # (T, L + 1)
        paths = np.array(list(itertools.product(range(L + 1), repeat=len(targets))))
        log_path = sum(log_w[t, paths[:, t]] for t in steps)
        log_caption = sum(rewards[t, paths[:, t]] for t in steps)
        assert np.exp(log_path).sum() == pytest.approx(1)
        assert np.logaddexp.reduce(log_path + log_caption) == pytest.approx(likelihood[n], abs=1e-5)
        bound = float(np.exp(log_path) @ log_caption)
        assert bound < likelihood[n] - 0.05


def test_posterior_is_bayes_rule():
    captioner, batch = make_captioner(), make_batch(mask=some_mask())
    with torch.no_grad():
        output = captioner(batch)
        posterior = captioner.evidence(batch, captioner.encode_batch(batch))
    assert posterior.shape == output.trace.alphas.shape
    torch.testing.assert_close(posterior.sum(-1), output.mask.float())
    assert not posterior[(~batch.annotation_mask).unsqueeze(1).expand_as(posterior)].any()
    with torch.no_grad():
        for n, (log_w, log_p) in enumerate(log_likelihoods(captioner, batch)):
            for t, word in enumerate([*WORDS[n], END]):
                joint = np.exp(log_w[t, 1:] + log_p[t, 1:, word])
                np.testing.assert_allclose(posterior[n, t], joint / joint.sum(), atol=1e-5)


def test_search_steps_equal_teacher_forcing():
    captioner, batch = make_captioner(), make_batch(mask=some_mask())
    decoder = captioner.decoder
    with torch.no_grad():
        memory = captioner.encode(annotations=batch.annotations, mask=batch.annotation_mask)
        output = captioner.teacher_force(batch, memory)
        logits = torch.zeros(*output.mask.shape, V)
        logits[output.mask] = output.logits
        for prepared in (memory, decoder.to_search_memory(memory)):
            state = decoder.init_state(prepared)
            for t in range(output.mask.shape[1]):
                step, state, _ = decoder.step(batch.captions[:, t], state, prepared)
                exists = output.mask[:, t]
                torch.testing.assert_close(step[exists], logits[:, t][exists], atol=1e-5, rtol=1e-4)


def test_searches_in_a_batch_equal_those_of_single_images():
    captioner, batch = make_captioner(std=1.0), make_batch(mask=some_mask())
    with torch.inference_mode():
        memory = captioner.encode(annotations=batch.annotations, mask=batch.annotation_mask)
        together = captioner.search(memory, BeamOptions(beam_size=3, max_length=8))
        for image in range(B):
            single = captioner.search(
                memory.select_images(torch.tensor([image])), BeamOptions(beam_size=3, max_length=8)
            )[0]
            assert [h.ids for h in single] == [h.ids for h in together[image]]
            assert [h.log_prob for h in single] == pytest.approx([h.log_prob for h in together[image]], abs=1e-4)


def test_hypotheses_get_the_posterior_of_their_words():
    captioner, batch = make_captioner(std=1.0), make_batch()
    with torch.inference_mode():
        memory = captioner.decoder.to_search_memory(captioner.encode(annotations=batch.annotations))
        hypotheses = captioner.search(memory, BeamOptions(beam_size=3, max_length=6))
        with_evidence = captioner.with_evidence(memory, hypotheses)
    for before, after in zip(itertools.chain(*hypotheses), itertools.chain(*with_evidence), strict=True):
        assert before.trace.evidence is None and before.ids == after.ids
        assert after.trace.evidence.shape == after.trace.alphas.shape == (len(after.ids), L)
        torch.testing.assert_close(after.trace.alphas, before.trace.alphas)
        torch.testing.assert_close(after.trace.evidence.sum(1), torch.ones(len(after.ids)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_agrees_with_float32(dtype):
    captioner, batch = make_captioner(dropout=0.0), make_batch()
    precise = captioner(batch)
    with torch.autocast("cpu", dtype=dtype):
        output = captioner(batch)
        hypotheses = captioner.search(captioner.encode(annotations=batch.annotations), BeamOptions(max_length=4))
    assert output.logits.dtype == torch.float32 and math.isfinite(hypotheses[0][0].log_prob)
    torch.testing.assert_close(output.logits, precise.logits, atol=0.15, rtol=0.05)
    reductions.step_nll(output.logits, output.targets).mean().backward()
    assert all(p.grad.isfinite().all() for p in captioner.decoder.parameters())


def test_a_saturated_gate_keeps_the_gradient_finite():
    captioner, batch = make_captioner(), make_batch()
    for bias in (-200.0, 200.0):
        captioner.decoder.gate.f_beta.bias.data.fill_(bias)
        captioner.zero_grad()
        output = captioner(batch)
        reductions.step_nll(output.logits, output.targets).mean().backward()
        assert output.logits.isfinite().all()
        assert all(p.grad.isfinite().all() for p in captioner.decoder.parameters())
