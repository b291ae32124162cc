"""State that attention carries between steps: coverage and NTM addressing against loops, and in searches."""

import numpy as np
import pytest
import torch
from helpers_models import batch_of, captioner_of, draw_weights

from captioning.attention import (
    AdditiveScore,
    Attention,
    ConcatScore,
    CoverageScore,
    HardAttention,
    LocalScore,
    LocationScore,
    MultiHeadAttention,
    NTMAttention,
    NTMScore,
    SoftAttention,
)
from captioning.decoding import beam_search
from captioning.model import AttentionDecoder
from captioning.model.captioner import Captioner

B, R, T, E, A, V = 2, 3, 4, 5, 6, 11
GRID = (3, 4)
L = GRID[0] * GRID[1]
D, H = 8, 7

STATEFUL = {
    "coverage": lambda: SoftAttention(CoverageScore(A)),
    "NTM": lambda: SoftAttention(NTMScore(A)),
    "NTM that writes": lambda: NTMAttention(NTMScore(A)),
    "hard NTM": lambda: HardAttention(NTMScore(A), context_mode="argmax"),
    "local coverage": lambda: SoftAttention(LocalScore(CoverageScore(A), window=(1.0, 1.5))),
    "heads with coverage": lambda: MultiHeadAttention(CoverageScore(A), heads=2),
}


def built(attention: Attention, annotation_dim: int = D, query_dim: int = H) -> Attention:
    attention.build(annotation_dim, query_dim, GRID)
    return draw_weights(attention, std=0.7).eval()


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


def steps_of(attention: Attention, queries: torch.Tensor, annotations: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """Alphas (T, B * R, L) of queries (T, B * R, H)."""
    memory, state, alphas = attention.prepare(annotations, mask), None, []
    for query in queries:
        out, state = attention(query, memory, state)
        alphas.append(out.alphas.detach().numpy())
    return np.stack(alphas)


def example() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mask = torch.rand(B, L) > 0.3
    mask[:, 5] = True
    return torch.randn(T, B * R, H), torch.randn(B, L, D), mask


def test_coverage_equals_a_loop_over_captions_steps_and_locations():
    score = CoverageScore(A)
    attention = built(SoftAttention(score))
    queries, annotations, mask = example()
    steps = steps_of(attention, queries, annotations, mask)
    weights = {name: value.detach().double().numpy() for name, value in score.named_parameters()}
    for row in range(B * R):
        coverage = np.zeros(L)
        for t in range(T):
            logits = np.full(L, -np.inf)
            for i in range(L):
                if mask[row // R, i]:
                    hidden = weights["annotation_projection.weight"] @ annotations[row // R, i].double().numpy()
                    hidden += weights["annotation_projection.bias"] + weights["coverage_weight"] * coverage[i]
                    hidden += weights["query_projection.weight"] @ queries[t, row].double().numpy()
                    logits[i] = weights["output.weight"][0] @ np.tanh(hidden)
            alphas = softmax(logits)
            np.testing.assert_allclose(steps[t, row], alphas, atol=1e-5)
            coverage += alphas


def test_ntm_addressing_equals_a_loop_over_the_grid():
    score = NTMScore(A)
    attention = built(SoftAttention(score))
    queries, annotations, mask = example()
    steps = steps_of(attention, queries, annotations, mask)
    weights = {name: value.detach().double().numpy() for name, value in score.named_parameters()}
    softplus, sigmoid = (lambda x: np.log1p(np.exp(x))), (lambda x: 1 / (1 + np.exp(-x)))
    for row in range(B * R):
        exists = mask[row // R].numpy()
        before = exists / exists.sum()
        for t in range(T):
            h = queries[t, row].double().numpy()
            key = weights["key.weight"] @ h + weights["key.bias"]
            sharpness, gate, exponent, *shift = weights["controls.weight"] @ h + weights["controls.bias"]
            shift = softmax(np.array(shift)).reshape(3, 3)
            cosine = np.full(L, -np.inf)
            for i in np.flatnonzero(exists):
                memory = weights["annotation_projection.weight"] @ annotations[row // R, i].double().numpy()
                cosine[i] = key @ memory / np.linalg.norm(key) / np.linalg.norm(memory)
            mixed = sigmoid(gate) * softmax(softplus(sharpness) * cosine) + (1 - sigmoid(gate)) * before
            moved = np.zeros(GRID)
            for y in range(GRID[0]):
                for x in range(GRID[1]):
                    for down in (-1, 0, 1):
                        for right in (-1, 0, 1):
                            if 0 <= y + down < GRID[0] and 0 <= x + right < GRID[1]:
                                probability = shift[down + 1, right + 1]
                                moved[y + down, x + right] += probability * mixed[y * GRID[1] + x]
            sharp = np.where(exists, moved.ravel() ** (1 + softplus(exponent)), 0.0)
            before = sharp / sharp.sum()
            np.testing.assert_allclose(steps[t, row], before, atol=1e-5)


def test_a_written_memory_equals_a_loop_over_captions_steps_and_locations():
    attention = built(NTMAttention(AdditiveScore(A)))
    queries, annotations, mask = example()
    weights = {name: value.detach().double().numpy() for name, value in attention.named_parameters()}

    def head(name: str, h: np.ndarray, written: np.ndarray, exists: np.ndarray) -> np.ndarray:
        logits = np.full(L, -np.inf)
        for i in np.flatnonzero(exists):
            hidden = weights[f"{name}.annotation_projection.weight"] @ written[i]
            hidden += weights[f"{name}.annotation_projection.bias"] + weights[f"{name}.query_projection.weight"] @ h
            logits[i] = weights[f"{name}.output.weight"][0] @ np.tanh(hidden)
        return softmax(logits)

    prepared, outputs, state = attention.prepare(annotations, mask), [], None
    for query in queries:
        out, state = attention(query, prepared, state)
        outputs.append(out)
    for row in range(B * R):
        written, exists = annotations[row // R].double().numpy().copy(), mask[row // R].numpy()
        for t in range(T):
            h = queries[t, row].double().numpy()
            read = head("score", h, written, exists)
            np.testing.assert_allclose(outputs[t].alphas[row].detach(), read, atol=1e-5)
            np.testing.assert_allclose(outputs[t].context[row].detach(), read @ written, atol=1e-5)
            v = head("write_head.score", h, written, exists)
            erase = 1 / (1 + np.exp(-(weights["erase.weight"] @ h + weights["erase.bias"])))
            add = weights["add.weight"] @ h + weights["add.bias"]
            for i in range(L):
                written[i] = written[i] * (1 - v[i] * erase) + v[i] * add
        np.testing.assert_allclose(state[0][row].detach(), written, atol=1e-5)


def test_the_write_head_learns_begins_with_almost_no_writing_and_keeps_small_writes_in_mixed_precision():
    queries, annotations, mask = example()
    writing, reading = NTMAttention(CoverageScore(A)), SoftAttention(CoverageScore(A))
    for attention in (writing, reading):
        attention.build(D, H, GRID)
    reading.score.load_state_dict(writing.score.state_dict())
    memories, states = [attention.prepare(annotations, mask) for attention in (writing, reading)], [None, None]
    for query in queries:
        (out, states[0]), (plain, states[1]) = (
            writing(query, memories[0], states[0]),
            reading(query, memories[1], states[1]),
        )
    torch.testing.assert_close(out.context, plain.context, atol=0.02, rtol=0.02)
    out.context.square().sum().backward()
    assert all(p.grad.any() for p in (writing.add.weight, writing.erase.weight, *writing.write_head.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        out, state = writing(queries[0], writing.prepare(annotations.bfloat16(), mask))
    assert out.context.dtype == torch.bfloat16 and state[0].dtype == torch.float32
    assert not torch.equal(state[0].unflatten(0, (B, R))[:, 0], annotations.bfloat16().float())


def test_concat_score_has_one_matrix_for_query_and_annotation():
    score = ConcatScore(A)
    attention = built(SoftAttention(score))
    query, annotations = torch.randn(B * R, H), torch.randn(B, L, D)
    joined = torch.cat([score.query_projection.weight, score.annotation_projection.weight], dim=1)  # W of [h; a]
    for row in range(B * R):
        pairs = torch.cat([query[row].expand(L, H), annotations[row // R]], dim=1)
        expected = torch.softmax(torch.tanh(pairs @ joined.T) @ score.output.weight[0], dim=0)
        torch.testing.assert_close(attention(query, attention.prepare(annotations))[0].alphas[row], expected)


def test_location_score_has_the_same_alphas_for_every_image():
    attention = built(SoftAttention(LocationScore()))
    query = torch.randn(1, H).expand(B, H)
    alphas = attention(query, attention.prepare(torch.randn(B, L, D)))[0].alphas
    torch.testing.assert_close(alphas[0], alphas[1])
    torch.testing.assert_close(alphas[0], torch.softmax(attention.score.output.weight @ query[0], dim=0))


# In the decoder


def captioner(attention: Attention) -> Captioner:
    decoder = AttentionDecoder(attention, embedding_dim=E, hidden_dim=H, dropout=0.0)
    return captioner_of(decoder, D, V, std=0.7).eval()


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL)
@pytest.mark.parametrize("beam_size", [1, 4])
def test_the_attention_state_follows_its_hypothesis(make, beam_size):
    """Every caption of a beam has the log-probabilities and alphas of that caption under teacher forcing."""
    model = captioner(make())
    images = torch.randn(5, 16, D)  # the encoder's grid is 4 x 4
    memory = model.encode(annotations=images)
    step, state = model.step_function(memory), model.decoder.init_state(memory)
    for image, hypotheses in enumerate(beam_search(step, state, beam_size=beam_size, max_length=6)):
        for hypothesis in hypotheses:
            forced = model.teacher_force(
                alone := batch_of([hypothesis.ids], images[image : image + 1]),
                model.encode(annotations=alone.annotations),
            )
            log_probs = forced.logits.log_softmax(-1).gather(-1, forced.targets.unsqueeze(-1)).squeeze(-1)
            steps = len(hypothesis.log_probs)
            torch.testing.assert_close(torch.tensor(hypothesis.log_probs), log_probs[:steps], atol=1e-4, rtol=1e-4)
            T = len(hypothesis.ids)
            torch.testing.assert_close(hypothesis.trace.alphas, forced.trace.alphas[0, :T], atol=1e-4, rtol=1e-3)
