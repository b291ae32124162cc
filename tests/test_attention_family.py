"""Every score with every selection. Classes are discovered: one that ``captioning.attention`` exports is tested."""

import dataclasses
import inspect

import pytest
import torch
from helpers import one_hot

import captioning.attention
from captioning.attention import (
    AdditiveScore,
    Attention,
    AttentionOutput,
    HardAttention,
    LocalScore,
    MultiHeadAttention,
    Normalizer,
    ScaledDotScore,
    Score,
    SoftAttention,
    Softmax,
    StochasticAttention,
    UniformAttention,
)
from captioning.data.batch import pad_captions
from captioning.model import AttentionDecoder
from captioning.trace import NO_LOCATION

B, R, T, E, A, V = 2, 3, 4, 5, 6, 13
GRID = (3, 5)
L = GRID[0] * GRID[1]
D = 8  # the hidden state has the same size, as the dot forms ask for


def classes(kind: type) -> list[type]:
    exported = [value for value in vars(captioning.attention).values() if inspect.isclass(value)]
    return [cls for cls in exported if issubclass(cls, kind) and not inspect.isabstract(cls)]


def score_of(cls: type[Score]) -> Score:
    options = {"attention_dim": A, "score": AdditiveScore(A), "window": (1.0, 1.5), "fused": False}
    return cls(**{name: options[name] for name in inspect.signature(cls.__init__).parameters if name in options})


SCORES = {cls.__name__: lambda cls=cls: score_of(cls) for cls in classes(Score)}
SCORES["ScaledDotScore without projections"] = ScaledDotScore
SCORES["LocalScore around ScaledDotScore"] = lambda: LocalScore(ScaledDotScore(A), window=(1.0, 1.5))
FAMILY = {
    f"{selection.__name__}({name})": lambda selection=selection, score=score: selection(score())
    for selection in classes(Attention)
    if "score" in inspect.signature(selection.__init__).parameters
    for name, score in SCORES.items()
} | {"UniformAttention()": UniformAttention}
FAMILY |= {
    f"{cls.__name__}({name}, {kind.__name__})": lambda cls=cls, kind=kind, name=name: cls(
        SCORES[name](), normalizer=kind()
    )
    for cls in (SoftAttention, HardAttention)
    for kind in classes(Normalizer)
    for name in ("AdditiveScore", "CosineScore", "CoverageScore")
    if kind is not Softmax
}

STOCHASTIC = [cls for cls in classes(StochasticAttention) if cls is not StochasticAttention]

every_pair = pytest.mark.parametrize("make", FAMILY.values(), ids=FAMILY)


def built(make, dtype: torch.dtype = torch.float32) -> Attention:
    attention = make()
    attention.build(D, D, GRID)
    attention.progress = 0.0
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return attention.to(dtype).eval()


def make_mask() -> torch.Tensor:
    mask = torch.rand(B, L) > 0.4
    mask[:, 3] = True
    return mask


@every_pair
@pytest.mark.parametrize("training", [False, True])
def test_alphas_are_probabilities_and_exactly_zero_at_masked_locations(make, training):
    attention, mask = built(make).train(training), make_mask()
    out = attention(torch.randn(B * R, D), attention.prepare(torch.randn(B, L, D), mask))[0]
    masked = ~mask.repeat_interleave(R, 0)
    assert out.context.shape == (B * R, D) and out.alphas.shape == (B * R, L) and out.locations.shape == (B * R,)
    torch.testing.assert_close(out.alphas.sum(-1), torch.ones(B * R))
    assert (out.alphas[masked] == 0).all()
    assert not one_hot(out.locations, L)[masked].any()


@every_pair
def test_masked_locations_do_not_influence_anything(make):
    attention, mask = built(make), make_mask()
    annotations, query = torch.randn(B, L, D), torch.randn(B * R, D)
    changed = annotations.masked_fill(~mask.unsqueeze(-1), 50.0)
    out, same = (attention(query, attention.prepare(a, mask))[0] for a in (annotations, changed))
    torch.testing.assert_close(same.context, out.context)
    torch.testing.assert_close(same.alphas, out.alphas)


@every_pair
def test_rows_of_one_image_equal_rows_of_its_copies(make):
    attention, mask = built(make), make_mask()
    annotations, query = torch.randn(B, L, D), torch.randn(B * R, D)
    shared = attention(query, attention.prepare(annotations, mask))[0]
    copies = attention.prepare(annotations.repeat_interleave(R, 0), mask.repeat_interleave(R, 0))
    torch.testing.assert_close(attention(query, copies)[0].context, shared.context)
    torch.testing.assert_close(attention(query, copies)[0].alphas, shared.alphas)


@every_pair
def test_selected_memory_is_that_of_the_selected_images(make):
    attention, mask, annotations = built(make), make_mask(), torch.randn(B, L, D)
    images, query = torch.tensor([1, 1, 0]), torch.randn(3, D)
    selected = attention.prepare(annotations, mask).select_images(images)
    again = attention.prepare(annotations[images], mask[images])
    torch.testing.assert_close(attention(query, selected)[0].context, attention(query, again)[0].context)
    torch.testing.assert_close(attention(query, selected)[0].alphas, attention(query, again)[0].alphas)


@every_pair
def test_autocast_computes_probabilities_in_float32_and_stays_close(make):
    attention, mask = built(make), make_mask()
    annotations, query = torch.randn(B, L, D), torch.randn(B * R, D)
    exact = attention(query, attention.prepare(annotations, mask))[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(query, attention.prepare(annotations.bfloat16(), mask))[0]
    assert out.alphas.dtype == torch.float32
    torch.testing.assert_close(out.alphas.sum(-1), torch.ones(B * R))
    # A position may round across the edge of a window, where the Gaussian is exp(-2) = 0.14.
    torch.testing.assert_close(out.alphas, exact.alphas, atol=0.15, rtol=0)
    torch.testing.assert_close(out.context.float(), exact.context, atol=0.5, rtol=0)


@every_pair
def test_gradients_match_finite_differences(make):
    attention, mask = built(make, torch.double), make_mask()

    def attend(annotations, query):
        out = attention(query, attention.prepare(annotations, mask))[0]
        return out.context, out.alphas

    annotations = torch.randn(B, L, D, dtype=torch.double, requires_grad=True)
    query = torch.randn(B * 2, D, dtype=torch.double, requires_grad=True)
    torch.autograd.gradcheck(attend, (annotations, query), fast_mode=True)


@every_pair
def test_deferred_gradients_equal_the_sum_over_steps(make):
    """The decoder computes weight gradients after the last step."""
    decoder = AttentionDecoder(make(), embedding_dim=E, hidden_dim=D, dropout=0.0)
    decoder.build(V, D, GRID)
    decoder = decoder.double().eval()
    captions, lengths = pad_captions(torch.randint(4, V, (B * R, T - 1)).tolist())
    annotations, target = torch.randn(B, L, D, dtype=torch.double), torch.randn(B * R, T, V, dtype=torch.double)

    decoder(captions, lengths, decoder.encode(annotations)).logits.mul(target.flatten(0, 1)).sum().backward()
    collected = {name: parameter.grad for name, parameter in decoder.named_parameters()}
    decoder.zero_grad()

    memory = decoder.encode(annotations)
    state = tuple(tensor.repeat_interleave(R, 0) for tensor in decoder.init_state(memory))
    for t in range(T):
        logits, state, _ = decoder.step(captions[:, t], state, memory)
        (logits * target[:, t]).sum().backward(retain_graph=True)
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, collected[name], msg=name)


@every_pair
def test_a_rebuilt_attention_loads_the_weights(make):
    attention = built(make)
    again = Attention.from_config(attention.to_config())
    assert again.to_config() == attention.to_config()
    again.build(D, D, GRID)
    again.load_state_dict(attention.state_dict())
    annotations, query = torch.randn(B, L, D), torch.randn(B * R, D)
    outputs = [module.eval()(query, module.prepare(annotations))[0] for module in (attention, again)]
    torch.testing.assert_close(outputs[0].context, outputs[1].context)


# Dropout on the weights


def dropping(cls: type[Attention], **options) -> Attention:
    return built(lambda: cls(AdditiveScore(A), dropout=0.5, **options)).train()


@pytest.mark.parametrize("cls", [SoftAttention, MultiHeadAttention])
def test_dropout_changes_the_weights_in_training_and_not_the_alphas_that_are_reported(cls):
    attention, annotations, query = dropping(cls), torch.randn(B, L, D), torch.randn(B * R, D)
    trained = attention(query, attention.prepare(annotations))[0]
    evaluated = attention.eval()(query, attention.prepare(annotations))[0]
    torch.testing.assert_close(trained.alphas, evaluated.alphas)
    assert not torch.allclose(trained.context, evaluated.context)


def select(attention: Attention) -> tuple[torch.Tensor, torch.Tensor, AttentionOutput]:
    """Alphas, the weights of the contexts (which are the contexts of one-hot annotations), and the selection."""
    alphas = torch.randn(B, R, L).softmax(-1)
    memory = attention.prepare(torch.randn(B, L, D))
    memory = dataclasses.replace(memory, annotations=torch.eye(L).expand(B, L, L))
    selected = attention.select(alphas, alphas.log(), memory)
    return alphas, selected.context, selected


@pytest.mark.parametrize("cls", STOCHASTIC)
def test_dropout_does_not_change_drawn_contexts(cls):
    alphas, weights, selected = select(dropping(cls, sample_probability=1.0))
    torch.testing.assert_close(weights, one_hot(selected.locations, L))
    drawn = alphas.gather(-1, selected.locations.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(selected.location_log_prob, drawn.log())


@pytest.mark.parametrize("cls", STOCHASTIC)
def test_dropout_applies_to_the_expectations_of_semi_sampling(cls):
    alphas, weights, selected = select(dropping(cls, sample_probability=0.0))
    kept = weights > 0
    assert not kept.all()
    torch.testing.assert_close(weights[kept], 2 * alphas[kept])
    assert (selected.locations == NO_LOCATION).all() and not selected.location_log_prob.any()


# Multi-head


def test_multi_head_attention_equals_a_loop_over_heads():
    attention = built(lambda: MultiHeadAttention(ScaledDotScore(), heads=2, dim=6))
    mask, annotations, query = make_mask(), torch.randn(B, L, D), torch.randn(B * R, D)
    out = attention(query, attention.prepare(annotations, mask))[0]
    for row in range(B * R):
        a, exists, contexts, alphas = annotations[row // R], mask[row // R], [], []
        for head in range(2):
            part = slice(3 * head, 3 * head + 3)
            q, k, v = (
                x @ layer.weight[part].T + layer.bias[part]
                for x, layer in (
                    (query[row], attention.query_projection),
                    (a, attention.key_projection),
                    (a, attention.value_projection),
                )
            )
            alpha = (k @ q / 3**0.5).masked_fill(~exists, -torch.inf).softmax(-1)
            alphas.append(alpha)
            contexts.append(alpha @ v)
        torch.testing.assert_close(out.context[row], attention.output(torch.cat(contexts)))
        torch.testing.assert_close(out.alphas[row], (alphas[0] + alphas[1]) / 2)
