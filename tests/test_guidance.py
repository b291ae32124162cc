"""Evidence, and the terms that teach attention where to look, against loops, hand-made cases and differences."""

import numpy as np
import pytest
import torch
from helpers_models import batch_of, captioner_of

from captioning.attention import (
    AdditiveScore,
    HardAttention,
    MultiHeadAttention,
    NTMAttention,
    NTMScore,
    ScaledDotScore,
    SoftAttention,
    Sparsemax,
)
from captioning.data.batch import CaptionBatch
from captioning.data.records import CaptionIndex, ImageEntry
from captioning.decoding import BeamOptions
from captioning.errors import InputError
from captioning.model import AttentionDecoder, Captioner, SummedOutput, TransformerDecoder
from captioning.objective import EvidenceGuidance, Guidance, Likelihood, RegionGuidance, SelfCriticalTraining
from captioning.vocabulary import END, START, Vocabulary

B, L, D, E, H = 2, 6, 8, 5, 9
VOCABULARY = Vocabulary("a dog on grass two cats".split())
WORDS = [["a", "dog", "on", "grass"], ["two", "cats"]]


def make_captioner(attention=None, **options) -> Captioner:
    torch.manual_seed(1)
    attention = attention or SoftAttention(AdditiveScore(4))
    decoder = AttentionDecoder(attention, embedding_dim=E, hidden_dim=H, dropout=0.0, **options)
    return captioner_of(decoder, D, len(VOCABULARY), std=0.4).double()


def make_batch(mask: bool = False) -> CaptionBatch:
    torch.manual_seed(2)
    exists = torch.ones(B, L, dtype=torch.bool)
    exists[0, 4:] = not mask
    return batch_of(list(map(VOCABULARY.encode, WORDS)), torch.randn(B, L, D, dtype=torch.float64), exists)


def with_regions(batch: CaptionBatch) -> CaptionBatch:
    """ "a dog" is in the first two cells, "cats" covers half of the last one."""
    regions = torch.zeros(3, L, dtype=torch.float64)
    regions[:2, :2], regions[2, -1] = 1.0, 0.5
    return batch._replace(regions=regions, region_steps=torch.tensor([[0, 0], [0, 1], [1, 1]]))


@pytest.mark.parametrize("gated", [False, True])
def test_location_terms_and_the_term_without_the_context_add_up_to_the_logit(gated):
    captioner, batch = make_captioner(gated=gated).eval(), make_batch(mask=True)
    decoder = captioner.decoder
    with torch.no_grad():
        memory, output = captioner.encode_batch(batch), captioner(batch)
        blind = decoder.output.L_z.weight.clone()
        parts = decoder.output.location_logits(batch.captions[:, 1:], memory)
        decoder.output.L_z.weight.zero_()  # the recurrence does not use L_z
        without = captioner(batch).logits
        decoder.output.L_z.weight.copy_(blind)
        evidence = captioner.evidence(batch, memory)
    betas = output.trace.betas if gated else torch.ones(output.mask.shape)
    for row, (n, t) in enumerate(output.mask.nonzero().tolist()):
        word, alphas = int(batch.captions[n, t + 1]), output.trace.alphas[n, t]
        summed = sum(float(betas[n, t] * alphas[i] * parts[n, t, i]) for i in range(L) if alphas[i])
        assert float(output.logits[row, word]) == pytest.approx(float(without[row, word]) + summed, abs=1e-9)
    torch.testing.assert_close(evidence, torch.softmax(parts, -1))
    assert not evidence[0, :, 4:].any() and output.trace.evidence is None


def test_captions_of_a_search_have_the_evidence_of_teacher_forcing():
    captioner, batch = make_captioner().eval(), make_batch()
    with torch.inference_mode():
        memory = captioner.encode_batch(batch)
        hypotheses = [[best] for best, *_ in captioner.search(memory, BeamOptions(beam_size=2, max_length=4))]
        for image, (hypothesis,) in enumerate(captioner.with_evidence(memory, hypotheses)):
            one = memory.select_images(torch.tensor([image]))
            (forced,) = captioner.teacher_force_captions(one, [hypothesis.ids])
            torch.testing.assert_close(hypothesis.trace.evidence, forced.trace.evidence.float())
    heads = make_captioner(MultiHeadAttention(ScaledDotScore(4), heads=2)).eval()
    assert heads.evidence(batch, heads.encode_batch(batch)) is None  # its logit is no sum over locations


CASES = {
    "soft": ({}, {}),
    "ungated": ({"gated": False}, {}),
    "word": ({"query_previous_word": True}, {}),
    "summed": ({"output": SummedOutput()}, {}),
    "samples": ({}, {"samples": 3}),
    "sparse": ({"attention": SoftAttention(AdditiveScore(4), normalizer=Sparsemax())}, {}),
    "hard": ({"attention": HardAttention(AdditiveScore(4), sample_probability=1.0)}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_both_terms_equal_a_loop_over_steps(name):
    model, options = CASES[name]
    captioner, batch = make_captioner(**model).train(), with_regions(make_batch())
    terms = [EvidenceGuidance(0.7, function_words=["a", "on"]), RegionGuidance(1.3)]
    objective = Likelihood(attention_penalty=0.0, entropy_weight=0.0, guidance=terms, **options).bind(captioner.decoder)
    for term in terms:
        term.prepare(VOCABULARY)
    _, logged, output = objective(captioner, batch)
    L_z, L_o = (layer.weight.detach().numpy() for layer in (captioner.decoder.output.L_z, captioner.decoder.output.L_o))
    evidence = region = 0.0
    S = len(output.mask) // len(WORDS)
    for n, t in output.mask.nonzero().tolist():
        caption, alphas, tiny = n // S, output.trace.alphas[n, t].detach().numpy(), np.finfo(np.float64).eps
        word = int(batch.captions[caption, t + 1])
        if word not in {START, END, *VOCABULARY.encode(["a", "on"])}:
            parts = batch.annotations[caption].numpy() @ L_z.T @ L_o[word]
            target = np.exp(parts - parts.max()) / np.exp(parts - parts.max()).sum()
            evidence += (target * np.log(target / alphas.clip(tiny))).sum()
        for coverage, position in zip(batch.regions.numpy(), batch.region_steps.tolist(), strict=True):
            region -= np.log(max((alphas * coverage).sum(), tiny)) * (position == [caption, t])
    words = int(output.mask.sum())
    assert logged["evidence_guidance"].item() == pytest.approx(evidence / words, rel=1e-6)
    assert logged["region_guidance"].item() == pytest.approx(region / words, rel=1e-6)
    expected = logged["nll"] + 0.7 * logged["evidence_guidance"] + 1.3 * logged["region_guidance"]
    assert logged["loss"].item() == pytest.approx(float(expected), rel=1e-6)


def test_the_gradient_of_the_terms_is_that_of_finite_differences_with_the_evidence_held_fixed():
    captioner, batch = make_captioner(query_previous_word=True).train(), with_regions(make_batch())
    terms = [EvidenceGuidance(1.0, function_words=[]), RegionGuidance(1.0)]
    for term in terms:
        term.prepare(VOCABULARY)

    def value() -> torch.Tensor:
        memory = captioner.encode_batch(batch)
        output = captioner.teacher_force(batch, memory)
        return sum(term(captioner.decoder, batch, memory, output).sum() for term in terms)

    decoder = captioner.decoder
    value().backward()
    assert decoder.output.L_o.weight.grad is None and decoder.output.L_z.weight.grad is None
    for weight in (decoder.word_to_query.weight, decoder.attention.score.output.weight, decoder.hidden_to_gates.weight):
        position = tuple(np.unravel_index(int(weight.grad.abs().argmax()), weight.shape))
        with torch.no_grad():
            around = []
            for step in (1e-6, -2e-6):
                weight[position] += step
                around.append(float(value()))
            weight[position] += 1e-6
        assert float(weight.grad[position]) == pytest.approx((around[0] - around[1]) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("attention", [SoftAttention, pytest.param(HardAttention, marks=pytest.mark.slow)])
def test_regions_teach_attention_to_look_at_them(attention):
    captioner, batch = make_captioner(attention(AdditiveScore(4))).train(), with_regions(make_batch())
    objective = Likelihood(attention_penalty=0.0, guidance=[RegionGuidance(1.0)]).bind(captioner.decoder)
    optimizer = torch.optim.Adam(captioner.decoder.parameters(), lr=0.03)
    for _ in range(150):
        optimizer.zero_grad()
        objective(captioner, batch).loss.backward()
        optimizer.step()
    caption, step = batch.region_steps.unbind(1)
    alphas = captioner.eval()(batch).trace.alphas[caption, step]
    assert ((alphas * (batch.regions > 0)).sum(-1) > 0.7).all()


def test_a_second_stage_keeps_the_terms_of_its_likelihood():
    captioner, batch = make_captioner().train(), with_regions(make_batch())
    likelihood = Likelihood(attention_penalty=0.0, guidance=[EvidenceGuidance(), RegionGuidance()])
    objective = SelfCriticalTraining(samples=2, likelihood=likelihood, likelihood_weight=0.5).bind(captioner.decoder)
    assert objective.needs_regions and not SelfCriticalTraining().needs_regions
    objective.prepare(CaptionIndex.build(".", [ImageEntry(0, "0.jpg", ["a dog"])]), VOCABULARY, BeamOptions())
    objective.reward = lambda rows, captions: torch.ones(len(captions))
    loss, logged, _ = objective(captioner, batch)  # equal rewards: the likelihood's loss is what is left
    expected = logged["nll"] + 0.5 * logged["evidence_guidance"] + 2.0 * logged["region_guidance"]
    assert loss.item() == pytest.approx(0.5 * float(expected), rel=1e-6)


@pytest.mark.parametrize("attention", [MultiHeadAttention(ScaledDotScore(4), heads=2), NTMAttention(NTMScore())])
def test_evidence_is_refused_where_the_context_is_no_sum_over_locations(attention):
    got = f"not AttentionDecoder with {type(attention).__name__}"
    with pytest.raises(InputError, match=f"needs an LSTM whose context sums over locations, {got}"):
        Likelihood(guidance=[EvidenceGuidance()]).bind(make_captioner(attention).decoder)


def test_evidence_of_a_transformer_is_refused_by_the_decoders_name():
    with pytest.raises(InputError, match="not TransformerDecoder with MultiHeadAttention"):
        Likelihood(guidance=[EvidenceGuidance()]).bind(TransformerDecoder(MultiHeadAttention(ScaledDotScore(4))))


class Own(Guidance):
    def forward(self, decoder, batch, memory, output):
        return output.mask.double()


def test_a_users_term_without_a_name_is_logged():
    captioner = make_captioner().train()
    objective = Likelihood(guidance=[Own(weight=0.5), RegionGuidance()]).bind(captioner.decoder)
    assert float(objective(captioner, make_batch()).logs["guidance"]) == 1


def test_the_query_reads_the_previous_word_and_a_search_sees_what_training_saw():
    batch, plain, knows = make_batch(), make_captioner().eval(), make_captioner(query_previous_word=True).eval()
    knows.load_state_dict(plain.state_dict() | {"decoder.word_to_query.weight": torch.zeros(H, E)})
    torch.testing.assert_close(knows(batch).logits, plain(batch).logits)  # U = 0: the paper's query
    torch.nn.init.normal_(knows.decoder.word_to_query.weight)
    with torch.no_grad():
        output, memory = knows(batch), knows.encode_batch(batch)
        other = batch._replace(captions=batch.captions.clone())
        other.captions[:, 1] = VOCABULARY.encode(["cats"])[0]
        changed = (knows(other).trace.alphas - output.trace.alphas).abs().amax(-1)
        assert not changed[:, 0].any() and (changed[:, 1] > 1e-6).all()  # y_1 is read at step 2
        state = knows.decoder.init_state(memory)
        for t in range(output.mask.shape[1]):
            _, state, trace = knows.decoder.step(batch.captions[:, t], state, memory)
            exists = output.mask[:, t]
            torch.testing.assert_close(trace.alphas[exists], output.trace.alphas[:, t][exists])
