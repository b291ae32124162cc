"""The authors' scalings, each against the formula of their code, with the settings of configs/arctic_parity.yaml."""

from pathlib import Path

import pytest
import torch
import yaml
from helpers import one_hot
from helpers_models import batch_of, captioner_of
from torch import Tensor

from captioning.attention import AdditiveScore, HardAttention, SoftAttention
from captioning.data.batch import CaptionBatch
from captioning.encoders import ConvEncoder
from captioning.model import AttentionDecoder, DecoderOutput
from captioning.model.captioner import Captioner
from captioning.objective import Likelihood, reductions
from captioning.objective.estimators import Estimator

B, L, D, A, E, H, V = 6, 5, 4, 3, 7, 8, 11
STEPS = 4  # of every caption: the authors' batches have one length
CONFIG = yaml.safe_load((Path(__file__).parent.parent / "configs" / "arctic_parity.yaml").read_text())
ATTENTION = CONFIG["model"]["decoder"]["init_args"]["attention"]["init_args"]


def make_captioner(**options) -> Captioner:
    options = {"sample_probability": 1.0, "per_batch": ATTENTION["per_batch"]} | options
    decoder = AttentionDecoder(HardAttention(AdditiveScore(A), **options), embedding_dim=E, hidden_dim=H, dropout=0.0)
    return captioner_of(decoder, D, V, std=0.6).double().train()


def make_objective(captioner: Captioner) -> Likelihood:
    """With everything that the config says about it."""
    options = CONFIG["model"]["objective"]["init_args"]
    assert options["reduction"]["class_path"] == "captioning.objective.ArcticReduction"
    return (
        Likelihood(
            estimator=Estimator.from_config(options["estimator"]),
            reduction=reductions.ArcticReduction(),
            **{name: options[name] for name in ("reward_weight", "entropy_weight", "attention_penalty")},
        )
        .bind(captioner.decoder)
        .double()
    )


def make_batch() -> CaptionBatch:
    captions = torch.randint(4, V, (B, STEPS - 1)).tolist()
    return batch_of(captions, torch.randn(B, L, D, dtype=torch.double))


def run(captioner: Captioner, objective: Likelihood, batch: CaptionBatch) -> tuple[Tensor, dict, DecoderOutput]:
    torch.manual_seed(7)
    return objective(captioner, batch)


def authors_gradient(captioner: Captioner, output: DecoderOutput, baseline: float) -> list[Tensor | None]:
    """capgen.py: the gradient of the cost with ``known_grads`` for the alphas, (T, N, L) there and (N, T, L) here:

    (baseline - masked_cost.mean(0)) / 10 * (-alphas_sample / alphas) + alpha_entropy_c * (log(alphas) + 1)
    """
    cost = -reductions.step_log_probs(output.logits, output.targets, output.mask)  # (N, T)
    alphas = output.trace.alphas
    surplus = (baseline - cost.mean(dim=1)).detach()
    dalphas = surplus.view(-1, 1, 1) / 10 * (-one_hot(output.trace.locations, alphas.shape[-1]) / alphas) + 0.002 * (
        alphas.log() + 1
    )
    total = cost.sum(dim=1).mean()  # cost.sum(0), then cost.mean()
    parameters = list(captioner.decoder.parameters())
    return torch.autograd.grad(
        [total, alphas],
        parameters,
        [torch.ones_like(total), dalphas.detach()],
        retain_graph=True,
        allow_unused=True,
    )


def assert_same_gradients(captioner: Captioner, loss: Tensor, expected: list[Tensor | None]) -> None:
    gradients = torch.autograd.grad(loss, list(captioner.decoder.parameters()), allow_unused=True)
    for a, b in zip(gradients, expected, strict=True):
        if a is not None or b is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("updates", [0, 3])
def test_gradient_equals_the_authors_with_their_injected_gradient_of_the_alphas(updates):
    """All scalings of stochastic attention at once: NLL, lambda_r, entropy, no penalty, no division by the batch."""
    captioner, batch = make_captioner(), make_batch()
    objective = make_objective(captioner)
    for _ in range(updates):
        objective(captioner, batch)
    baseline = -float(objective.estimator.averages)  # theirs averages costs, ours log-probabilities
    assert (baseline == 0.0) == (updates == 0)  # theirs starts at 0
    loss, _, output = run(captioner, objective, batch)
    assert_same_gradients(captioner, loss, authors_gradient(captioner, output, baseline))


def test_gradient_of_expected_contexts_equals_the_authors():
    """Their injected gradient is then (b - cost) / 10 times ones, which a softmax turns into nothing."""
    captioner, batch = make_captioner(sample_probability=0.0), make_batch()
    objective = make_objective(captioner)
    loss, _, output = run(captioner, objective, batch)
    assert_same_gradients(captioner, loss, authors_gradient(captioner, output, baseline=0.0))


def test_the_loss_of_soft_attention_equals_the_authors():
    decoder = AttentionDecoder(SoftAttention(AdditiveScore(A)), embedding_dim=E, hidden_dim=H, dropout=0.0)
    captioner = Captioner(ConvEncoder((D,), (4,), image_size=16), decoder, vocabulary_size=V).double()
    objective = Likelihood(attention_penalty=1.0, reduction=reductions.ArcticReduction()).bind(decoder)
    loss, _, output = objective(captioner, make_batch())
    cost = -reductions.step_log_probs(output.logits, output.targets, output.mask).sum(1).mean()
    torch.testing.assert_close(loss, cost + ((1 - output.trace.alphas.sum(1)) ** 2).sum(0).mean(0), check_dtype=False)


def test_baseline_follows_the_mean_cost_of_a_word_and_keeps_nine_tenths():
    captioner, batch = make_captioner(), make_batch()
    objective = make_objective(captioner)
    _, terms, output = run(captioner, objective, batch)
    mean = -reductions.step_nll(output.logits, output.targets).mean()
    assert float(objective.estimator.averages) == pytest.approx(0.1 * float(mean.detach()))
    assert float(terms["baseline"]) == 0.0 and float(terms["reward"]) == pytest.approx(float(mean.detach()))


def test_baseline_also_follows_batches_without_draws(monkeypatch):
    captioner, batch = make_captioner(sample_probability=0.5), make_batch()
    objective = make_objective(captioner)
    monkeypatch.setattr(torch, "rand", lambda size, device: torch.ones(size, device=device))  # the coin: expectation
    _, _, output = run(captioner, objective, batch)
    assert not output.location_log_prob.any()
    mean = -reductions.step_nll(output.logits, output.targets).mean()
    assert float(objective.estimator.averages) == pytest.approx(0.1 * float(mean.detach()))


def test_reinforce_and_entropy_grow_with_the_batch_and_ours_do_not():
    values, mask = torch.rand(B, STEPS), torch.ones(B, STEPS, dtype=torch.bool)
    twice = values.repeat(2, 1), mask.repeat(2, 1)
    authors, ours = reductions.ArcticReduction(), reductions.Reduction()
    torch.testing.assert_close(authors.reduce_steps(*twice), 2 * authors.reduce_steps(values, mask))
    torch.testing.assert_close(ours.reduce_steps(*twice), ours.reduce_steps(values, mask))
