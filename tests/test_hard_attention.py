"""Drawing locations: the right distribution, one location per step, semi-sampling, context modes, schedules."""

import pytest
import torch
from helpers_models import batch_of, captioner_of, draw_weights

from captioning.attention import (
    AdditiveScore,
    Attention,
    GumbelAttention,
    HardAttention,
    SoftAttention,
    Sparsemax,
    StochasticAttention,
)
from captioning.attention.hard import draw, select_at
from captioning.data.batch import pad_captions
from captioning.model import AttentionDecoder, DecoderOutput
from captioning.objective import Likelihood
from captioning.objective.reductions import step_entropy
from captioning.trace import NO_LOCATION

B, T, L, D, A, E, H, V = 4, 5, 9, 7, 6, 8, 10, 13


def make_decoder(attention: Attention) -> AttentionDecoder:
    decoder = AttentionDecoder(attention, embedding_dim=E, hidden_dim=H, dropout=0.0)
    decoder.build(V, D, (1, L))
    attention.progress = 0.0
    return draw_weights(decoder, std=0.5)


def decode(decoder: AttentionDecoder, annotations: torch.Tensor, mask=None, captions_each: int = 1) -> DecoderOutput:
    captions, lengths = pad_captions([[5, 6, 7, 8], [5, 6], [9, 8, 7], [4]])
    memory = decoder.encode(annotations, mask)
    return decoder(captions.repeat_interleave(captions_each, 0), lengths.repeat_interleave(captions_each, 0), memory)


def one_hot_steps(output: DecoderOutput) -> torch.Tensor:
    """(N, T) bool, the steps whose context is one location."""
    return (output.trace.locations != NO_LOCATION) & output.mask


@pytest.mark.parametrize("attention", [HardAttention, GumbelAttention])
def test_every_step_draws_one_location_and_reports_its_log_probability(attention):
    decoder = make_decoder(attention(AdditiveScore(A), sample_probability=1.0)).train()
    output = decode(decoder, torch.randn(B, L, D))
    assert torch.equal(one_hot_steps(output), output.mask)
    locations = output.trace.locations
    assert (locations[output.mask] >= 0).all() and locations.max() < L
    assert (locations[~output.mask] == NO_LOCATION).all()
    drawn = output.trace.alphas.gather(-1, locations.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(output.location_log_prob[output.mask], drawn[output.mask].log())
    assert (output.location_log_prob[~output.mask] == 0).all()


def test_locations_are_drawn_as_often_as_alphas_say():
    alphas = torch.tensor([0.5, 0.05, 0.0, 0.3, 0.15])
    count = torch.bincount(draw(alphas.expand(20_000, 5)), minlength=5)
    expected = alphas * 20_000
    assert count[2] == 0
    chi_squared = ((count - expected) ** 2 / expected)[alphas > 0].sum()
    assert chi_squared < 16.3  # exceeded once in a thousand seeds, three degrees of freedom


@pytest.mark.parametrize("attention", [HardAttention, GumbelAttention])
def test_masked_locations_are_never_drawn_and_gradients_stay_finite(attention):
    decoder = make_decoder(attention(AdditiveScore(A))).train()
    mask = torch.ones(B, L, dtype=torch.bool)
    mask[:, 2:] = False
    output = decode(decoder, torch.randn(B, L, D), mask, captions_each=50)
    assert set(output.trace.locations[output.mask].tolist()) - {NO_LOCATION} == {0, 1}
    (output.location_log_prob.sum() + output.logits.sum() + step_entropy(output.trace.alphas).sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in decoder.parameters() if p.grad is not None)


def test_context_is_the_annotation_of_the_drawn_location():
    attention = HardAttention(AdditiveScore(A), sample_probability=1.0)
    attention.build(D, H, (1, L))
    attention.train()
    annotations = torch.randn(B, L, D)
    out = attention(torch.randn(B * 3, H), attention.prepare(annotations))[0]
    chosen = out.locations
    torch.testing.assert_close(out.context, annotations.repeat_interleave(3, 0)[torch.arange(B * 3), chosen])
    torch.testing.assert_close(out.location_log_prob, out.alphas.log()[torch.arange(B * 3), chosen])


@pytest.mark.parametrize(
    ("attention", "probability", "reaches"),
    [(HardAttention, 1.0, False), (HardAttention, 0.0, True), (GumbelAttention, 1.0, True)],
)
def test_hard_contexts_pass_no_gradient_to_the_score_and_others_do(attention, probability, reaches):
    decoder = make_decoder(attention(AdditiveScore(A), sample_probability=probability)).train()
    decode(decoder, torch.randn(B, L, D)).logits.sum().backward()
    gradient = decoder.attention.score.output.weight.grad
    assert (gradient is not None and bool(gradient.abs().sum() > 0)) == reaches


def test_a_checkpoint_has_the_arguments_of_a_relaxed_draw():
    options = {"ramp": (0.2, 0.4), "per_batch": True, "dropout": 0.1, "context_mode": "argmax"}
    config = GumbelAttention(AdditiveScore(A), **options).to_config()
    assert Attention.from_config(config).to_config() == config
    assert config["init_args"].items() >= {**options, "ramp": [0.2, 0.4], "sample_probability": 1.0}.items()


def test_a_relaxed_draw_follows_the_alphas_of_its_normalizer():
    attention = GumbelAttention(AdditiveScore(A), normalizer=Sparsemax())
    attention.progress = 0.0
    attention.build(D, H, (1, L))
    draw_weights(attention, std=3.0)
    torch.manual_seed(1)
    attention.train()
    memory = attention.prepare(torch.randn(B, L, D))
    output, _ = attention(torch.randn(B, 40, H).flatten(0, 1), memory, None)
    assert (output.alphas == 0).any()
    assert (output.alphas.gather(-1, output.locations.unsqueeze(-1)) > 0).all()


def test_the_relaxed_draw_approaches_the_drawn_location_as_the_temperature_falls():
    def jacobian(temperature: float) -> float:
        attention = GumbelAttention(AdditiveScore(A), temperature=temperature)
        attention.progress = 0.0
        attention.build(L, H, (1, L))
        logits = torch.randn(1, 2000, L, requires_grad=True)
        torch.manual_seed(1)
        attention.train()
        memory = attention.prepare(torch.eye(L).unsqueeze(0))  # the contexts are the weights
        log_alphas = torch.log_softmax(logits, -1)
        weights = attention.select(log_alphas.exp(), log_alphas, memory).context
        (gradient,) = torch.autograd.grad(weights.square().sum(), logits)
        return float((gradient.abs().sum(-1) < 1e-3).float().mean())

    assert jacobian(0.05) > jacobian(0.5) + 0.2  # most relaxed samples are saturated where it is cold


@pytest.mark.parametrize("captions_each", [1, 3])
def test_semi_sampling_decides_image_by_image_for_all_steps_and_captions(captions_each):
    decoder = make_decoder(HardAttention(AdditiveScore(A), sample_probability=0.5)).train()
    drawn_images = set()
    for _ in range(20):
        output = decode(decoder, torch.randn(B, L, D), captions_each=captions_each)
        drawn = one_hot_steps(output).view(B, -1)
        exists = output.mask.view(B, -1)
        for image in range(B):
            assert drawn[image, exists[image]].unique().numel() == 1
        drawn_images.add(tuple(drawn.any(1).tolist()))
    assert len(drawn_images) > 5  # not one decision for the batch


def test_images_that_are_not_drawn_have_the_contexts_of_soft_attention():
    hard = make_decoder(HardAttention(AdditiveScore(A), sample_probability=0.0)).train()
    soft = make_decoder(SoftAttention(AdditiveScore(A))).train()
    soft.load_state_dict(hard.state_dict(), strict=False)
    annotations = torch.randn(B, L, D)
    output, reference = decode(hard, annotations), decode(soft, annotations)
    torch.testing.assert_close(output.logits, reference.logits)
    assert (output.trace.locations == NO_LOCATION).all()
    torch.testing.assert_close(output.trace.alphas, reference.trace.alphas)
    assert (output.location_log_prob == 0).all() and reference.location_log_prob is None


def test_context_modes_take_the_expectation_the_most_probable_or_a_drawn_location():
    decoder = make_decoder(HardAttention(AdditiveScore(A))).eval()
    annotations = torch.randn(B, L, D)
    expected = decode(decoder, annotations)
    assert (expected.trace.locations == NO_LOCATION).all()
    decoder.attention.context_mode = "argmax"
    sure = decode(decoder, annotations)
    assert torch.equal(one_hot_steps(sure), sure.mask)
    assert torch.equal(sure.trace.locations[sure.mask], sure.trace.alphas[sure.mask].argmax(-1))
    torch.testing.assert_close(decode(decoder, annotations).logits, sure.logits)
    decoder.attention.context_mode = "sample"
    draws = [decode(decoder, annotations) for _ in range(2)]
    assert torch.equal(one_hot_steps(draws[0]), draws[0].mask)
    assert not torch.equal(draws[0].trace.locations, draws[1].trace.locations)


# Schedules


def training(attention: StochasticAttention) -> StochasticAttention:
    attention.build(D, H, (1, L))
    return attention.train()


@pytest.mark.parametrize(
    ("ramp", "probabilities"),
    [
        ((0.25, 0.75), [0, 0, 0, 0.2, 0.4, 0.6, 0.8, 0.8]),
        ((0.125, 0.375, 0.5, 0.75), [0, 0, 0.4, 0.8, 0.8, 0.4, 0, 0]),
    ],
)
def test_ramp_moves_the_probability_linearly_between_fractions_of_training(ramp, probabilities):
    attention = training(HardAttention(AdditiveScore(A), sample_probability=0.8, ramp=ramp))
    for number, probability in enumerate(probabilities):
        attention.progress = number / len(probabilities)
        drawn = attention.prepare(torch.randn(50, L, D)).drawn
        assert attention.logged_values() == {"sample_probability": pytest.approx(probability)}
        assert attention.may_draw == (probability > 0) == bool(drawn.any())


@pytest.mark.parametrize(
    "make", [lambda: HardAttention(AdditiveScore(A), ramp=(0, 1)), lambda: GumbelAttention(AdditiveScore(A))]
)
def test_attention_that_changes_over_training_must_be_told_the_progress(make):
    attention = training(make())
    with pytest.raises(ValueError, match=r"Attention: set progress \(0 to 1 of training\) before each batch"):
        attention.prepare(torch.randn(2, L, D))
    attention.eval().prepare(torch.randn(2, L, D))


def test_a_ramp_of_null_means_no_ramp():
    attention = HardAttention(AdditiveScore(4), sample_probability=0.3, ramp=None)
    assert attention.current_sample_probability == 0.3


def test_the_count_of_batches_in_a_checkpoint_of_0_2_is_ignored():
    attention = training(HardAttention(AdditiveScore(A), ramp=(0, 1)))
    attention.load_state_dict(attention.state_dict() | {"batches": torch.tensor(8)})


def test_temperature_falls_to_half_over_training_and_relaxes_the_samples_of_its_batch():
    attention = training(GumbelAttention(AdditiveScore(A), temperature=2.0))
    annotations, query = torch.randn(B, L, D), torch.randn(B, H, requires_grad=True)
    for progress, temperature in ((0, 2.0), (0.25, 2**0.75), (0.5, 2**0.5), (0.75, 2**0.25), (1, 1.0), (1.25, 1.0)):
        attention.progress = progress
        assert attention.temperature == pytest.approx(temperature)
        memory = attention.prepare(annotations)
        torch.manual_seed(6)
        gradient = torch.autograd.grad(attention(query, memory)[0].context.sum(), query)[0]
        torch.manual_seed(6)
        log_alphas = attention.score(query.unsqueeze(1), memory.projected).log_softmax(dim=-1)
        gumbel = -torch.empty_like(log_alphas).exponential_().log()
        relaxed = ((log_alphas + gumbel) / temperature).softmax(dim=-1)
        torch.testing.assert_close(gradient, torch.autograd.grad((relaxed @ annotations).sum(), query)[0])


class OwnHardAttention(Attention):
    """A class of the user's that draws every context."""

    needs_estimator = True
    may_draw = True

    def select(self, alphas, log_alphas, memory):
        return select_at(alphas, log_alphas, draw(alphas), memory)


def test_drawn_locations_of_a_class_of_ones_own_are_trained_by_reinforce():
    attention = OwnHardAttention(AdditiveScore(A))
    decoder = AttentionDecoder(attention, embedding_dim=E, hidden_dim=H)
    captioner = captioner_of(decoder, D, V, 0.5, grid_size=(1, L)).train()
    objective = Likelihood(attention_penalty=0.0, entropy_weight=0.0).bind(decoder)
    loss = objective(captioner, batch_of([[5, 6, 7], [8, 4]], torch.randn(2, L, D)))
    loss.loss.backward()
    assert loss.logs["reward"] < 0 and attention.score.output.weight.grad.abs().max() > 0
