"""The variational bound: its gradient against enumeration of all draws, and what it is a bound of."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from captioning.attention import AdditiveScore, SoftAttention
from captioning.data.batch import CaptionBatch, pad_captions
from captioning.decoder import AttentionDecoder
from captioning.encoders import ConvEncoder
from captioning.errors import InputError
from captioning.model import Captioner
from captioning.objective.estimators import Estimator, ExpectedContext, LeaveOneOut, NoBaseline, SelfCritical
from captioning.objective.objective import Objective
from captioning.output import MarginalOutput, VariationalOutput, variational

D, A, E, H, V = 3, 3, 4, 5, 8
GRID = (1, 4)


def make_captioner(output: MarginalOutput, *, dropout: float = 0.0, gated: bool = True) -> Captioner:
    torch.manual_seed(3)
    decoder = AttentionDecoder(
        SoftAttention(AdditiveScore(A)), embedding_dim=E, hidden_dim=H, dropout=dropout, gated=gated, output=output
    )
    encoder = ConvEncoder((D,), (4,), image_size=16)
    encoder.grid_size = GRID
    captioner = Captioner(encoder, decoder, vocabulary_size=V).double()
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.8)
    return captioner.train()


def make_batch(words: list[list[int]], *, mask: Tensor | None = None) -> CaptionBatch:
    """A caption for each image."""
    captions, lengths = pad_captions(words)
    each = torch.arange(len(words))
    annotations = 2 * torch.randn(len(words), 4, D, dtype=torch.double, generator=torch.Generator().manual_seed(5))
    return CaptionBatch(captions, lengths, each, each, each, annotations=annotations, annotation_mask=mask)


def gradient(captioner: Captioner, loss: Tensor) -> Tensor:
    parameters = list(captioner.decoder.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found, strict=True)]
    )


def parts(captioner: Captioner, batch: CaptionBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return log w, log q and log p(y_t | z) of every step of captions of one length, (N, T, C + 1) each.

    Step by step and location by location, with the annotations of two cells averaged where they are a block.
    """
    decoder = captioner.decoder
    memory = captioner.encode(annotations=batch.annotations, mask=batch.annotation_mask)
    state, output = decoder.init_state(memory), decoder.words
    width = 1 if output.block is None else output.block[1]
    exists = memory.exists.double().unflatten(1, (-1, width))  # (N, C, width)
    count = exists.sum(2).clamp(min=1)
    components = (memory.annotations.unflatten(1, (-1, width)) * exists.unsqueeze(3)).sum(2) / count.unsqueeze(2)
    of_location = components @ decoder.context_to_output.weight.t()  # (N, C, E)
    log_w, log_q, log_p = [], [], []
    for t in range(batch.captions.shape[1] - 1):
        embedded, targets = decoder.embedding(batch.captions[:, t]), batch.captions[:, t + 1]
        state, kept = decoder._recur(decoder.embedding_to_gates(embedded), state, memory)
        beta = torch.ones(len(targets)) if kept.gate is None else torch.sigmoid(kept.gate)
        alphas = kept.alphas.unflatten(1, (-1, width)).sum(2)
        log_w.append(torch.cat([(1 - beta).unsqueeze(1), beta.unsqueeze(1) * alphas], 1).log())
        hidden = embedded + kept.h @ decoder.hidden_to_output.weight.t()
        at = torch.cat([hidden.unsqueeze(1), hidden.unsqueeze(1) + of_location], 1)  # (N, C + 1, E)
        words = torch.log_softmax(at @ decoder.output.weight.t() + decoder.output.bias, -1)
        log_p.append(words[torch.arange(len(targets)), :, targets])
        word = decoder.output.weight[targets].detach()
        query = word @ output.word_query.weight.t() + hidden.detach() @ output.state_query.weight.t()
        query = query + output.state_query.bias
        keys = of_location.detach() @ output.location_key.weight.t()
        keys = torch.cat([output.nowhere_key.expand(len(keys), 1, -1), keys], 1)
        scores = (keys * query.unsqueeze(1)).sum(2) / output.inference_dim**0.5
        log_q.append(torch.log_softmax(scores.masked_fill(log_w[-1] == float("-inf"), float("-inf")), 1))
    return torch.stack(log_w, 1), torch.stack(log_q, 1), torch.stack(log_p, 1)


def bound(log_w: Tensor, log_q: Tensor, log_p: Tensor) -> Tensor:
    """E_q[log p(y | z)] - KL(q || w), (N, T)."""
    q = log_q.exp()
    return torch.where(q > 0, q * (log_p - log_q + log_w).nan_to_num(), 0.0).sum(-1)


@pytest.mark.parametrize(
    ("estimator", "words", "options"),
    [
        (NoBaseline(), [[4]], {}),
        (ExpectedContext(), [[4]], {}),
        (ExpectedContext(), [[4], [6]], {"block": (1, 2)}),
        (LeaveOneOut(2), [[4]], {"block": (1, 2)}),
    ],
    ids=["no baseline", "expected context", "blocks", "leave one out"],
)
def test_expected_gradient_over_all_draws_is_that_of_the_bound(estimator: Estimator, words, options, monkeypatch):
    captioner = make_captioner(VariationalOutput(inference_dim=3, **options))
    batch = make_batch(words)
    log_w, log_q, log_p = parts(captioner, batch)
    exact = gradient(captioner, -bound(log_w, log_q, log_p).mean())
    objective = Objective(
        captioner.decoder.attention, captioner.decoder.words, estimator=estimator, attention_penalty=0.0
    )
    probability = log_q.detach().exp().repeat_interleave(estimator.samples, 0).flatten(0, 1)  # (M, C + 1)
    expected, total = torch.zeros_like(exact), 0.0
    for drawn in itertools.product(range(probability.shape[1]), repeat=len(probability)):
        z = torch.tensor(drawn)
        monkeypatch.setattr(variational, "draw", lambda _, z=z: z)
        p = float(probability.gather(1, z.unsqueeze(1)).prod())
        expected += p * gradient(captioner, objective(captioner, batch)[0])
        total += p
    assert total == pytest.approx(1)
    assert float(exact.abs().max()) > 0.01
    torch.testing.assert_close(expected, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_it_bounds_the_exact_likelihood_and_the_posterior_makes_them_equal(masked, gated):
    mask = torch.tensor([[True, False, True, True], [False, True, True, False]]) if masked else None
    captioner, batch = (
        make_captioner(VariationalOutput(inference_dim=3), gated=gated),
        make_batch([[4], [6]], mask=mask),
    )
    log_w, log_q, log_p = parts(captioner, batch)
    captioner.eval()
    output = captioner.teacher_force(batch, captioner.encode(annotations=batch.annotations, mask=mask))
    exact = output.logits.gather(1, output.targets.unsqueeze(1)).view(2, 2)
    assert (bound(log_w, log_q, log_p) < exact - 1e-3).all()
    posterior = torch.log_softmax(log_w + log_p, -1)
    torch.testing.assert_close(bound(log_w, posterior, log_p), exact)


def test_training_makes_the_bound_tight():
    captioner = make_captioner(VariationalOutput(inference_dim=8)).float()
    batch = make_batch([[4, 5], [6, 7]])
    objective = Objective(captioner.decoder.attention, captioner.decoder.words, attention_penalty=0.0)
    optimizer = torch.optim.Adam(captioner.decoder.parameters(), 0.02)
    terms = []
    for _ in range(150):
        loss, found, _ = objective(captioner, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        terms.append(found)
    assert terms[-1]["loss"] < 0.1 < terms[0]["loss"]
    assert {"divergence", "reward", "baseline", "advantage_std"} <= set(terms[0])
    assert all(term["divergence"] >= 0 for term in terms)


def test_a_row_draws_for_itself_and_masked_locations_are_never_drawn(monkeypatch):
    mask = torch.tensor([[True, False, False, False]])
    captioner, batch = make_captioner(VariationalOutput(inference_dim=3), gated=False), make_batch([[4]], mask=mask)
    seen = []
    original = variational.draw
    monkeypatch.setattr(variational, "draw", lambda q: seen.append(original(q)) or seen[-1])
    captioner.teacher_force(batch, captioner.encode(annotations=batch.annotations, mask=mask), 50)
    assert seen[0].tolist() == [1] * 100
    captioner = make_captioner(VariationalOutput(inference_dim=3))
    captioner.teacher_force(batch, captioner.encode(annotations=batch.annotations), 50)
    assert len(set(seen[1].view(50, 2)[:, 0].tolist())) > 1


def test_outside_training_it_is_the_marginal_output():
    captioner, batch = (
        make_captioner(VariationalOutput(inference_dim=3, block=(1, 2))).eval(),
        make_batch([[4], [6, 5]]),
    )
    marginal = make_captioner(MarginalOutput(block=(1, 2))).eval()
    marginal.decoder.load_state_dict(captioner.decoder.state_dict(), strict=False)
    for one in (captioner, marginal):
        one.decoder.words.top_k = 1
    found, expected = captioner(batch), marginal(batch)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.trace.posterior, expected.trace.posterior)
    assert found.drawn is None


def test_in_bfloat16_everything_is_finite():
    captioner = make_captioner(VariationalOutput(inference_dim=3), dropout=0.5).float()
    batch = make_batch([[4, 5], [6]])
    objective = Objective(captioner.decoder.attention, captioner.decoder.words, label_smoothing=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _, output = objective(captioner, batch)
    loss.backward()
    assert output.drawn is not None and output.drawn.divergence.dtype == torch.float32
    assert all(p.grad is None or p.grad.isfinite().all() for p in captioner.parameters())
    assert captioner.decoder.words.word_query.weight.grad.abs().sum() > 0


def test_senseless_options_are_refused():
    attention = SoftAttention(AdditiveScore(A))
    with pytest.raises(InputError, match="inference_dim must be at least 1, got 0"):
        VariationalOutput(inference_dim=0)
    with pytest.raises(InputError, match="VariationalOutput knows the expected context alone, not SelfCritical's"):
        Objective(attention, VariationalOutput(), estimator=SelfCritical())
    with pytest.raises(InputError, match="rows_per_caption: the estimator draws 2 rows of a caption; leave it out"):
        Objective(attention, VariationalOutput(), estimator=LeaveOneOut(2), rows_per_caption=3)
    with pytest.raises(InputError, match="leave NoBaseline out"):
        Objective(attention, MarginalOutput(), estimator=NoBaseline())
