"""The transformer decoder against PyTorch's layers, steps against all words at once, searches and training."""

import math

import numpy as np
import pytest
import torch
from helpers_models import batch_of, captioner_of, most_probable_words
from torch import Tensor, nn

from captioning.attention import (
    AdditiveScore,
    AnnotationAttention,
    Attention,
    CoverageScore,
    DotScore,
    GumbelAttention,
    HardAttention,
    MultiHeadAttention,
    NTMScore,
    ScaledDotScore,
    SoftAttention,
    UniformAttention,
)
from captioning.attention.layers import sinusoids
from captioning.data.batch import pad_captions
from captioning.decoding import BeamOptions
from captioning.errors import InputError
from captioning.model import AttentionDecoder, Decoder, TransformerDecoder
from captioning.model.captioner import Captioner
from captioning.objective import LeaveOneOut, Likelihood, reductions
from captioning.vocabulary import END, PAD, START

GRID, D, DIM, V = (2, 3), 5, 8, 11
B, L = 3, 6
CAPTIONS = [[4, 5, 6], [7], [8, 9, 10, 4]]


def heads() -> Attention:
    return MultiHeadAttention(ScaledDotScore(), heads=2)


def make_decoder(attention: Attention | None = None, **options) -> TransformerDecoder:
    torch.manual_seed(4)
    options = {"dim": DIM, "layers": 2, "heads": 4, "feedforward_dim": 12} | options
    decoder = TransformerDecoder(attention or heads(), **options)
    decoder.build(V, D, GRID)
    for name, parameter in decoder.named_parameters():
        if "norm" not in name and "before" not in name:
            nn.init.normal_(parameter, std=0.4)
    return decoder.eval()


def make_captioner(decoder: Decoder | None = None, vocabulary_size: int = V) -> Captioner:
    decoder = decoder or TransformerDecoder(heads(), dim=DIM, layers=2, heads=4)
    return captioner_of(decoder, D, vocabulary_size, std=0.5, grid_size=GRID).eval()


def make_mask() -> Tensor:
    mask = torch.ones(B, L, dtype=torch.bool)
    mask[0, 4:], mask[2, [0, 3]] = False, False
    return mask


def by_step(decoder: Decoder, captions: Tensor, lengths: Tensor, memory, rows: int = 1) -> tuple[Tensor, Tensor]:
    """Logits (M, V) and alphas (M, L), one step after the other."""
    state = tuple(tensor.repeat_interleave(rows, 0) for tensor in decoder.init_state(memory))
    logits, alphas = [], []
    for t in range(captions.shape[1] - 1):
        out, state, trace = decoder.step(captions[:, t], state, memory)
        logits.append(out)
        alphas.append(trace.alphas)
    exists = torch.arange(len(logits)) < lengths.unsqueeze(1)
    return torch.stack(logits, 1)[exists], torch.stack(alphas, 1)[exists]


# The mathematics


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "attention",
    [heads, lambda: SoftAttention(AdditiveScore(3)), lambda: SoftAttention(DotScore()), UniformAttention],
)
def test_steps_equal_teacher_forcing(attention, masked, rows):
    decoder = make_decoder(attention(), standardize_annotations=True)
    memory = decoder.encode(torch.randn(B, L, D), make_mask() if masked else None)
    captions, lengths = pad_captions([ids[: 1 + row] for ids in CAPTIONS for row in range(rows)])
    output = decoder(captions, lengths, memory)
    logits, alphas = by_step(decoder, captions, lengths, memory, rows)
    torch.testing.assert_close(logits, output.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(alphas, output.trace.alphas[output.mask], atol=1e-6, rtol=0)
    torch.testing.assert_close(alphas.sum(-1), torch.ones(len(alphas)))
    if output.trace.head_alphas is not None:
        assert output.trace.head_alphas.shape == (*output.mask.shape, 2, L)
        torch.testing.assert_close(output.trace.head_alphas.mean(2), output.trace.alphas)
    assert (output.trace.alphas[~output.mask] == 0).all()
    assert output.targets.tolist() == captions[:, 1:][output.mask].tolist()


def reference_of(decoder: TransformerDecoder) -> list[nn.TransformerDecoderLayer]:
    """Return PyTorch's layers with the decoder's weights; words and annotations have one number of heads there."""
    references = []
    for layer, attention in zip(decoder.layers, decoder.attentions(), strict=True):
        reference = nn.TransformerDecoderLayer(
            DIM, layer.heads, layer.feedforward[0].out_features, batch_first=True, norm_first=True
        )
        weights = {
            "self_attn.in_proj": layer.word_projection,
            "self_attn.out_proj.": layer.word_output,
            "multihead_attn.out_proj.": attention.output,
            "linear1.": layer.feedforward[0],
            "linear2.": layer.feedforward[3],
            "norm1.": layer.before_words,
            "norm2.": layer.before_attention,
            "norm3.": layer.before_feedforward,
        }
        state = {
            f"{name}{'' if name.endswith('.') else '_'}{kind}": getattr(module, kind)
            for name, module in weights.items()
            for kind in ("weight", "bias")
        }
        looks = (attention.query_projection, attention.key_projection, attention.value_projection)
        for kind in ("weight", "bias"):
            state[f"multihead_attn.in_proj_{kind}"] = torch.cat([getattr(module, kind) for module in looks])
        reference.load_state_dict(state)
        references.append(reference.eval())
    return references


@pytest.mark.parametrize("masked", [False, True])
def test_the_transformer_equals_pytorchs_layers_with_the_same_weights(masked):
    decoder = make_decoder(MultiHeadAttention(ScaledDotScore(), heads=4), layers=3)
    annotations, mask = torch.randn(B, L, D), make_mask() if masked else None
    captions, lengths = pad_captions(CAPTIONS)
    output = decoder(captions, lengths, decoder.encode(annotations, mask))
    T = captions.shape[1] - 1
    memory = annotations @ decoder.annotation_projection.weight.T + decoder.annotation_projection.bias
    position, index = np.meshgrid(np.arange(T), np.arange(DIM), indexing="ij")
    angle = position / 10_000 ** ((index % (DIM // 2)) / (DIM // 2))
    positions = torch.from_numpy(np.where(index < DIM // 2, np.sin(angle), np.cos(angle))).float()
    x = decoder.embedding.weight[captions[:, :-1]] * math.sqrt(DIM) + positions
    causal = nn.Transformer.generate_square_subsequent_mask(T)
    absent = None if mask is None else torch.zeros(B, L).masked_fill(~mask, -math.inf)
    for layer in reference_of(decoder):
        query = layer.norm2(x + layer._sa_block(layer.norm1(x), causal, None))
        _, alphas = layer.multihead_attn(query, memory, memory, key_padding_mask=absent)  # the mean over heads
        x = layer(x, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=absent)
    logits = nn.functional.layer_norm(x, (DIM,)) @ decoder.to_words.weight.T + decoder.to_words.bias
    torch.testing.assert_close(output.logits, logits[output.mask], atol=2e-5, rtol=0)
    torch.testing.assert_close(output.trace.alphas[output.mask], alphas[output.mask], atol=1e-5, rtol=0)


def test_positions_are_sines_and_cosines_from_any_first_word():
    whole = sinusoids(torch.arange(7), 6)
    torch.testing.assert_close(sinusoids(torch.arange(3, 5), 6), whole[3:5])
    by_hand = [[f(t / 10_000 ** (k / 3)) for f in (math.sin, math.cos) for k in range(3)] for t in range(7)]
    torch.testing.assert_close(whole, torch.tensor(by_hand))


def test_a_word_influences_no_word_before_it():
    decoder = make_decoder()
    memory = decoder.encode(torch.randn(1, L, D))
    lengths = torch.tensor([6])
    captions = torch.tensor([[START, 4, 5, 6, 7, 8, END]])
    logits = decoder(captions, lengths, memory).logits
    for t in range(1, 6):
        other = captions.clone()
        other[0, t] = 10
        changed = (decoder(other, lengths, memory).logits != logits).any(dim=1)
        assert changed.tolist() == [False] * t + [True] * (6 - t)


def test_padding_and_masked_locations_change_nothing():
    decoder, mask = make_decoder(annotation_layer=AnnotationAttention(dim=8, heads=2)), make_mask()
    annotations = torch.randn(B, L, D)
    captions, lengths = pad_captions(CAPTIONS)
    output = decoder(captions, lengths, decoder.encode(annotations, mask))
    longer = torch.cat([captions, torch.full((B, 4), PAD)], 1)
    other = annotations.masked_fill(~mask.unsqueeze(-1), 50.0)
    same = decoder(longer, lengths, decoder.encode(other, mask))
    torch.testing.assert_close(same.logits, output.logits)
    assert (output.trace.alphas[~mask.unsqueeze(1).expand_as(output.trace.alphas)] == 0).all()


# Searches


@pytest.mark.parametrize("lstm", [False, True])
def test_hypotheses_of_a_search_equal_teacher_forcing(lstm):
    attention = MultiHeadAttention(ScaledDotScore(), heads=2, dim=4)
    captioner = make_captioner(AttentionDecoder(attention, embedding_dim=5, hidden_dim=7) if lstm else None)
    layer = captioner.decoder.output.L_o if lstm else captioner.decoder.to_words
    nn.init.constant_(layer.bias[END], 1.25)
    memory = captioner.encode(annotations=torch.randn(B, L, D), mask=make_mask())
    searched = captioner.search(memory, BeamOptions(beam_size=3, max_length=6))
    assert (
        len({len(hypothesis.ids) for hypotheses in searched for hypothesis in hypotheses}) > 1
    )  # images left the search
    for rank in range(3):
        best = [hypotheses[rank] for hypotheses in searched]
        for hypothesis, forced in zip(
            best, captioner.teacher_force_captions(memory, [h.ids for h in best]), strict=True
        ):
            torch.testing.assert_close(hypothesis.trace.alphas, forced.trace.alphas, atol=1e-5, rtol=0)
            head_alphas = hypothesis.trace.head_alphas
            assert head_alphas.shape == (len(hypothesis.ids), 2, L) and len(head_alphas) > 0
            torch.testing.assert_close(head_alphas, forced.trace.head_alphas, atol=1e-5, rtol=0)
            assert hypothesis.log_probs == pytest.approx(forced.log_probs[: len(hypothesis.log_probs)], abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beam_of_one_takes_the_most_probable_words_in_float32(dtype):
    captioner = make_captioner()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        memory = captioner.encode(annotations=torch.randn(40, L, D).half())
        expected = most_probable_words(captioner, memory, 6)
        beams = captioner.search(memory, BeamOptions(beam_size=1, max_length=6))
        logits, after, _ = captioner.decoder.step(torch.full((40,), START), captioner.init_state(memory), memory)
        assert logits.dtype == torch.float32
        assert all(tensor.shape == (40, 1, DIM) and tensor.dtype == dtype for tensor in after)
    assert [beam[0].ids for beam in beams] == expected
    assert len(set(map(tuple, expected))) > 3


# Training


def test_every_parameter_learns_through_every_term():
    decoder = TransformerDecoder(
        heads(),
        dim=DIM,
        layers=2,
        heads=2,
        dropout=0.2,
        standardize_annotations=True,
        annotation_layer=AnnotationAttention(dim=DIM, heads=2),
    )
    captioner = make_captioner(decoder).train()
    objective = Likelihood(label_smoothing=0.1, attention_penalty=0.7, samples=2).bind(captioner.decoder)
    loss, terms, output = objective(captioner, batch_of(CAPTIONS, torch.randn(B, L, D), make_mask()))
    assert set(terms) == {"loss", "nll", "attention_penalty"}
    penalty = [
        np.mean([(1 - alphas[:, i].detach().sum().item()) ** 2 for i in range(L) if exists[i]])
        for alphas, exists in zip(output.trace.alphas, make_mask().repeat_interleave(2, 0), strict=True)
    ]
    assert float(terms["attention_penalty"]) == pytest.approx(np.mean(penalty), abs=1e-6)
    nll = reductions.step_nll(output.logits, output.targets, label_smoothing=0.1).mean()
    assert float(loss.detach()) == pytest.approx(float(nll.detach() + 0.7 * terms["attention_penalty"]), abs=1e-5)
    loss.backward()
    # A key's bias adds the same to all logits, which the softmax does not see.
    silent = [name for name, p in captioner.decoder.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert all("key_projection.bias" in name for name in silent), silent


# Refused options


class CountingAttention(SoftAttention):
    """An attention with a state of its own besides that of its score."""

    def init_state(self, memory):
        return (memory.annotations.new_zeros(len(memory.annotations), 1),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_decoder(HardAttention(AdditiveScore(3))), "HardAttention draws locations"),
        (lambda: make_decoder(GumbelAttention(AdditiveScore(3))), "GumbelAttention draws locations"),
        (lambda: make_decoder(SoftAttention(CoverageScore(3))), "CoverageScore carries a state from word to word"),
        (lambda: make_decoder(MultiHeadAttention(NTMScore(3), heads=2)), "NTMScore carries a state.*another score"),
        (
            lambda: make_decoder(CountingAttention(AdditiveScore(3))),
            "CountingAttention with AdditiveScore carries a state",
        ),
        (lambda: make_decoder(dim=10), "dim 10 must be even and a multiple of its 4 heads"),
        (lambda: make_decoder(dim=9, heads=3), "dim 9 must be even"),
        (lambda: make_decoder(layers=0), "layers"),
        (lambda: make_decoder(heads=0), "heads"),
        (lambda: make_decoder(dropout=1.0), "dropout"),
        (
            lambda: Likelihood(estimator=LeaveOneOut(2)).bind(make_decoder()),
            "estimator: MultiHeadAttention is differentiable",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(make, message):
    with pytest.raises(InputError, match=message) as error:
        make()
    assert "\n" not in str(error.value)
