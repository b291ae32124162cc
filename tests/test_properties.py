"""What must hold of any captions, lengths, masks and beams, on examples that hypothesis makes up.

Each claim is checked on a few examples in the quick tests, and on many more in the slow ones.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from captioning.attention import AdditiveScore, Attention, HardAttention, SoftAttention
from captioning.data.batch import pad_captions
from captioning.decoding import BeamOptions, Constraints, Step, beam_search
from captioning.encoders import ConvEncoder
from captioning.model import AttentionDecoder, SummedOutput
from captioning.model.captioner import Captioner
from captioning.objective.reductions import step_nll
from captioning.trace import AttentionTrace
from captioning.vocabulary import END, PAD, START, UNK

EXAMPLES = pytest.mark.parametrize("examples", [20, pytest.param(300, marks=pytest.mark.slow)])


def holds(examples: int, *strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], None]:
    """Check the decorated claim on ``examples`` examples, the same ones every time."""

    def check(claim: Callable[..., None]) -> None:
        options = settings(max_examples=examples, deadline=None, derandomize=True, database=None)
        options(given(*strategies)(claim))()

    return check


# Lengths and masks

V, D, E, H = 11, 6, 5, 7
id_lists = st.lists(st.lists(st.integers(UNK, V - 1), max_size=6), min_size=1, max_size=4)


@EXAMPLES
def test_padded_captions_have_their_words_and_lengths(examples):
    @holds(examples, id_lists)
    def claim(ids):
        padded, lengths = pad_captions(ids)
        assert lengths.tolist() == [len(words) + 1 for words in ids]
        assert padded.shape == (len(ids), max(lengths) + 1)
        for row, words in zip(padded.tolist(), ids, strict=True):
            assert row == [START, *words, END] + [PAD] * (len(row) - len(words) - 2)


def make_decoder(kind: str) -> AttentionDecoder:
    attention: type[Attention] = HardAttention if kind == "hard" else SoftAttention
    output = SummedOutput() if kind == "summed" else None
    torch.manual_seed(0)
    return AttentionDecoder(attention(AdditiveScore(4)), embedding_dim=E, hidden_dim=H, output=output)


@pytest.mark.parametrize("kind", ["soft", "hard", "summed"])
@EXAMPLES
def test_the_loss_of_a_batch_does_not_depend_on_padding_and_masked_locations(examples, kind):
    """Padding may hold any numbers."""
    decoder = make_decoder(kind)
    decoder.build(V, D, (3, 3))
    decoder.eval()

    @holds(examples, id_lists, st.lists(st.integers(1, 5), min_size=4, max_size=4), st.floats(-1e3, 1e3), st.data())
    @torch.no_grad()
    def claim(ids, regions, garbage, data):
        seed = data.draw(st.integers(0, 99))
        regions = regions[: len(ids)]
        a = torch.randn(len(ids), max(regions) + 1, D, generator=torch.Generator().manual_seed(seed))
        mask = torch.arange(a.shape[1]) < torch.tensor(regions).unsqueeze(1)
        a[~mask] = garbage
        padded, lengths = pad_captions(ids)
        together = decoder(padded, lengths, decoder.encode(a, mask))
        alone = []
        for row, words in enumerate(ids):
            output = decoder(*pad_captions([words]), decoder.encode(a[row : row + 1, : regions[row]]))
            alone.append(step_nll(output.logits, output.targets).mean() * (len(words) + 1))
        whole = step_nll(together.logits, together.targets).mean() * lengths.sum()
        torch.testing.assert_close(whole, torch.stack(alone).sum(), rtol=1e-4, atol=1e-4)
        assert int(together.mask.sum()) == int(lengths.sum()) == len(together.targets)
        steps = together.trace.alphas[together.mask]
        torch.testing.assert_close(steps.sum(-1), torch.ones(len(steps)))
        rows = together.mask.nonzero()[:, 0]
        assert not steps[~mask[rows]].any()


# Beams

tables = st.integers(0, 10_000).map(
    lambda seed: torch.randn(7, 7, generator=torch.Generator().manual_seed(seed)).mul(2).log_softmax(-1)
)
TABLE_WORDS, LONGEST = range(4, 7), 4


class Steps:
    """A step function of one image, whose next word depends on the last one alone."""

    image_count = 1

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def __call__(self, tokens, state):
        nothing = torch.zeros(len(tokens), 1)
        return Step(self.table[tokens], state, AttentionTrace(nothing, None, tokens))


def log_prob(table: torch.Tensor, path: list[int]) -> float:
    return sum(float(table[before, after]) for before, after in itertools.pairwise(path))


def start() -> tuple[torch.Tensor]:
    return (torch.zeros(1, 1),)


@EXAMPLES
def test_hypotheses_are_distinct_ranked_and_scored_by_their_words(examples):
    options = st.tuples(st.integers(1, 90), st.sampled_from([0.0, 0.7, 1.0]), st.integers(0, LONGEST - 1))

    @holds(examples, tables, options)
    def claim(table, options):
        width, normalization, shortest = options
        search = {"length_normalization": normalization, "max_length": LONGEST}
        search["constraints"] = Constraints(min_length=shortest)
        (beams,) = beam_search(Steps(table), start(), beam_size=width, **search)
        assert 1 <= len(beams) <= width
        assert [(not h.finished, -h.log_prob) for h in beams] == sorted((not h.finished, -h.log_prob) for h in beams)
        assert len({tuple(h.ids) for h in beams}) == len(beams)
        for h in beams:
            path = [START, *h.ids, *([END] if h.finished else [])]
            assert set(h.ids) <= set(TABLE_WORDS) and len(h.ids) >= shortest
            steps = len(path) - 1
            assert h.log_prob == pytest.approx(log_prob(table, path) / steps**normalization, abs=1e-4)
            assert sum(h.log_probs) == pytest.approx(log_prob(table, path), abs=1e-4) and len(h.log_probs) == steps


@pytest.mark.parametrize("kind", ["soft", "hard", "summed"])
@EXAMPLES
def test_the_scores_of_a_search_are_those_of_forced_decoding(examples, kind):
    decoder = make_decoder(kind)
    encoder = ConvEncoder((3, D), (2, 2), image_size=12)
    captioner = Captioner(encoder, decoder, vocabulary_size=V).eval()
    for name, parameter in decoder.named_parameters():
        if "output" in name or "score" in name:
            torch.nn.init.normal_(parameter, 0, 2)

    @holds(examples, st.integers(0, 999), st.integers(1, 4), st.sampled_from([0.0, 0.8]))
    @torch.no_grad()
    def claim(seed, width, normalization):
        memory = captioner.encode(annotations=torch.randn(2, 9, D, generator=torch.Generator().manual_seed(seed)))
        options = BeamOptions(beam_size=width, max_length=7, length_normalization=normalization)
        for image, beams in enumerate(captioner.search(memory, options)):
            for h in (h for h in beams if h.finished):
                (forced,) = captioner.teacher_force_captions(memory.select_images(torch.tensor([image])), [h.ids])
                assert h.log_probs == pytest.approx(forced.log_probs, abs=1e-4)
                assert h.log_prob == pytest.approx(forced.log_prob / len(h.log_probs) ** normalization, abs=1e-4)
                torch.testing.assert_close(h.trace.alphas, forced.trace.alphas, rtol=1e-4, atol=1e-4)


# Samplers
