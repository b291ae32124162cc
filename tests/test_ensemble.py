"""Ensembles: the mean distribution of several captioners at every step of a search."""

import math

import numpy as np
import pytest
import torch
from helpers_runs import SIDE
from torch import Tensor, nn

from captioning.attention import AdditiveScore, Attention, CoverageScore, HardAttention, MultiHeadAttention
from captioning.attention import SoftAttention as Soft
from captioning.data.batch import CaptionBatch, pad_captions
from captioning.decoding import BeamOptions
from captioning.encoders import ConvEncoder
from captioning.errors import InputError
from captioning.model import AttentionDecoder, Output, SummedOutput
from captioning.model.captioner import Captioner
from captioning.model.ensemble import Ensemble
from captioning.objective.reductions import step_nll
from captioning.vocabulary import END, PAD, START, UNK

B, V, T = 3, 11, 6


def make_member(seed: int, attention: Attention, output: Output | None = None, **encoder) -> Captioner:
    torch.manual_seed(seed + 10)
    decoder = AttentionDecoder(attention, embedding_dim=8, hidden_dim=5 + seed, gated=seed != 2, output=output)
    member = Captioner(ConvEncoder(**{"channels": (4, 6), "strides": (2, 2), "image_size": SIDE} | encoder), decoder,
                       vocabulary_size=V)  # fmt: skip
    for name, parameter in decoder.named_parameters():
        if "output" in name or "gates" in name or "score" in name:
            nn.init.normal_(parameter, 0, 2)
    nn.init.normal_(decoder.embedding.weight)
    with torch.no_grad():
        decoder.output.L_o.bias[END] = -5.0  # captions of several words
    return member.eval()


def make_members() -> list[Captioner]:
    """Return soft attention with a state, hard without a gate, summed, and one on a coarser grid of another view."""
    return [
        make_member(1, Soft(CoverageScore(5))),
        make_member(2, HardAttention(AdditiveScore(4))),
        make_member(3, Soft(AdditiveScore(3)), SummedOutput()),
        make_member(
            4, MultiHeadAttention(AdditiveScore(5), heads=2), channels=(4, 8), strides=(2, 4), image_size=2 * SIDE
        ),
    ]


def make_views() -> list[Tensor]:
    torch.manual_seed(9)
    return [3 * torch.randn(B, 3, side, side) for side in (SIDE, 2 * SIDE)]


def views_of(members: list[Captioner], views: list[Tensor]) -> list[Tensor]:
    return [next(view for view in views if view.shape[-1] == m.encoder.preprocessing.size[0]) for m in members]


class Alone:
    """One member and one image, word by word, with probabilities in NumPy."""

    def __init__(self, member: Captioner, view: Tensor) -> None:
        self.decoder, self.memory = member.decoder, member.encode(view[None])

    def start(self):
        return self.decoder.init_state(self.memory)

    def step(self, token: int, state):
        logits, state, trace = self.decoder.step(torch.tensor([token]), state, self.memory)
        logits = logits[0].double().numpy()
        return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum(), state, trace


def beam_by_hand(members: list[Alone], K: int) -> list[tuple[float, tuple[int, ...], list[np.ndarray]]]:
    """Search without batches; return each hypothesis: (log-probability, ids, the first member's alphas by step)."""
    live, done = [(0.0, (), [m.start() for m in members], [])], []
    for words in range(T):
        candidates = []
        for score, ids, states, alphas in live:
            steps = [m.step(ids[-1] if ids else START, s) for m, s in zip(members, states, strict=True)]
            mean = sum(p for p, _, _ in steps) / len(steps)
            after, seen = [s for _, s, _ in steps], [*alphas, steps[0][2].alphas[0].numpy()]
            allowed = set(range(V)) - {PAD, START, UNK} - ({END} if words < 1 else set())
            candidates += [(score + math.log(mean[word]), (*ids, word), after, seen) for word in sorted(allowed)]
        best = sorted(candidates, key=lambda c: -c[0])[: K - len(done)]
        done += [c for c in best if c[1][-1] == END]
        live = [c for c in best if c[1][-1] != END]
        if not live:
            break
    ended = sorted(done, key=lambda c: -c[0]) + sorted(live, key=lambda c: -c[0])
    return [(score, ids, alphas) for score, ids, _, alphas in ended]


@pytest.mark.parametrize("K", [1, 3])
@torch.no_grad()
def test_the_search_of_an_ensemble_equals_a_loop_over_models_and_hypotheses(K):
    members, views = make_members(), make_views()
    ensemble = Ensemble(members).eval()
    memory = ensemble.encode_views(views)
    hypotheses_of = ensemble.search(memory, BeamOptions(beam_size=K, max_length=T))
    views_of_members = views_of(members, views)
    for image, hypotheses in enumerate(hypotheses_of):
        alone = [Alone(member, view[image]) for member, view in zip(members, views_of_members, strict=True)]
        expected = beam_by_hand(alone, K)
        assert [tuple(h.ids) + (END,) * h.finished for h in hypotheses] == [ids for _, ids, _ in expected]
        for hypothesis, (score, ids, alphas) in zip(hypotheses, expected, strict=True):
            assert hypothesis.log_prob == pytest.approx(score, rel=1e-4)
            words = len(ids) - hypothesis.finished
            np.testing.assert_allclose(hypothesis.trace.alphas.numpy(), np.array(alphas)[:words], atol=1e-5)
    assert len({tuple(hypotheses[0].ids) for hypotheses in hypotheses_of}) > 1


@torch.no_grad()
def test_a_step_sums_to_one_and_its_trace_is_the_first_models():
    members, views = make_members(), make_views()
    ensemble = Ensemble(members).eval()
    memory = ensemble.encode_views(views)
    out = ensemble.step_function(memory)(torch.full((B,), START), ensemble.init_state(memory))
    torch.testing.assert_close(out.log_probs.exp().sum(-1), torch.ones(B))
    torch.testing.assert_close(out.trace.alphas.sum(-1), torch.ones(B))
    assert out.trace.alphas.shape == (B, math.prod(members[0].encoder.grid_size))
    assert out.trace.betas is not None  # the second has no gate
    assert len(ensemble.preprocessings) == 2


def make_batch(views: list[Tensor]) -> CaptionBatch:
    captions, lengths = pad_captions([[5, 6], [7], [4, 9, 10], [8, 8], [6]])
    image_index, images = torch.tensor([0, 0, 1, 2, 2]), torch.arange(B)
    return CaptionBatch(captions, lengths, image_index, images, images, images=views[0])


@torch.no_grad()
def test_the_likelihood_of_references_is_that_of_the_mean_probabilities():
    members, views = make_members(), make_views()
    asked = []

    def load_images(rows, preprocessing):
        asked.append(preprocessing)
        return views[1][rows]

    ensemble, batch = Ensemble(members, load_images=load_images).eval(), make_batch(views)
    memory = ensemble.encode_batch(batch)
    with ensemble.in_context_mode("expected"):
        output = ensemble.teacher_force(batch, memory)
    assert asked == [members[3].encoder.preprocessing]  # once, and for the one encoder that needs it
    probabilities = np.zeros(len(output.targets))
    for member, view in zip(members, views_of(members, views), strict=True):
        forced = member(batch._replace(images=view))
        probabilities += np.exp(-step_nll(forced.logits, forced.targets).double().numpy()) / len(members)
    log_probs = -step_nll(output.logits, output.targets)
    np.testing.assert_allclose(log_probs.numpy(), np.log(probabilities), rtol=1e-4)
    existing = output.mask.nonzero(as_tuple=True)
    torch.testing.assert_close(output.trace.alphas[existing].sum(-1), torch.ones(len(output.targets)))


def test_context_modes_reach_the_members_that_have_them():
    members = make_members()
    ensemble = Ensemble(members)
    with ensemble.in_context_mode("argmax"):
        assert [m.decoder.attention.context_mode for m in members] == ["expected", "argmax", "expected", "expected"]
    assert {m.decoder.attention.context_mode for m in members} == {"expected"}
    with (
        pytest.raises(InputError, match="no model of the ensemble knows 'argmax'"),
        Ensemble([members[0], members[2]]).in_context_mode("argmax"),
    ):
        pass


# Checkpoints
