"""Decoding on hand-written Markov tables: the next word depends on the last one alone, so all can be enumerated."""

import functools
import itertools

import pytest
import torch

from captioning.decoding import Constraints, Step, beam_search, sample
from captioning.errors import InputError
from captioning.trace import AttentionTrace
from captioning.vocabulary import END, PAD, START, UNK

V, L = 7, 3  # words 4, 5, 6
WORDS = range(4, V)
MAX_LENGTH = 5


class Steps:
    """A step function of ``image_count`` equal images."""

    def __init__(self, step, image_count: int) -> None:
        self.step, self.image_count = step, image_count

    def __call__(self, tokens, state):
        return self.step(tokens, state)

    def select_images(self, images):
        return Steps(self.step, len(images))


def markov(table: torch.Tensor, image_count: int = 1) -> Steps:
    """A step function whose alphas encode the previous word and the number of steps before."""

    def step(tokens, state):
        (count,) = state
        alphas = torch.stack([tokens.float(), count[:, 0], torch.zeros(len(tokens))], 1)
        return Step(table[tokens], (count + 1,), AttentionTrace(alphas, tokens / 10, tokens))

    return Steps(step, image_count)


def start(rows: int):
    return (torch.zeros(rows, 1),)


def table(seed: int = 0) -> torch.Tensor:
    return torch.randn(V, V, generator=torch.Generator().manual_seed(seed)).mul(2).log_softmax(-1)


def every_caption(log_probs: torch.Tensor, *, min_length: int = 0, normalization: float = 0.0):
    """All finished captions of fewer than MAX_LENGTH words, best first."""
    captions = []
    for n in range(min_length, MAX_LENGTH):
        for ids in itertools.product(WORDS, repeat=n):
            path = [START, *ids, END]
            total = sum(float(log_probs[a, b]) for a, b in itertools.pairwise(path))
            captions.append((total / (n + 1) ** normalization, list(ids)))
    return sorted(captions, key=lambda item: -item[0])


@pytest.mark.parametrize("normalization", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("min_length", [0, 2])
def test_wide_beam_search_equals_exhaustive_enumeration(normalization, min_length):
    expected = every_caption(table(), min_length=min_length, normalization=normalization)
    hypotheses = beam_search(
        markov(table(), 2), start(2), beam_size=400, length_normalization=normalization, max_length=MAX_LENGTH,
        constraints=Constraints(min_length=min_length),
    )  # fmt: skip
    for image in hypotheses:
        # Captions with the same transitions in another order tie, so ranks are compared by score.
        scores = [h.log_prob for h in image if h.finished]
        assert scores == pytest.approx([score for score, _ in expected], abs=1e-4)
        by_ids = {tuple(h.ids): h.log_prob for h in image if h.finished}
        assert by_ids == pytest.approx({tuple(ids): score for score, ids in expected}, abs=1e-4)


def narrowing_beam(log_probs: torch.Tensor, beam_size: int):
    """The search in plain Python, one hypothesis at a time."""
    live, ended = [(0.0, [START])], []
    for _ in range(MAX_LENGTH):
        candidates = [
            (total + float(log_probs[ids[-1], word]), [*ids, word])
            for total, ids in live
            for word in range(V)
            if word not in (PAD, START, UNK)
        ]
        best = sorted(candidates, key=lambda item: -item[0])[: beam_size - len(ended)]
        ended += [item for item in best if item[1][-1] == END]
        live = [item for item in best if item[1][-1] != END]
        if not live:
            break
    by_score = lambda item: -item[0]  # noqa: E731
    ranked = [(s, i[1:-1], True) for s, i in sorted(ended, key=by_score)]
    return ranked + [(s, i[1:], False) for s, i in sorted(live, key=by_score)]


@pytest.mark.parametrize("beam_size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_beam_search_equals_a_plain_loop_over_hypotheses(beam_size, seed):
    (hypotheses,) = beam_search(markov(table(seed)), start(1), beam_size=beam_size, max_length=MAX_LENGTH)
    expected = narrowing_beam(table(seed), beam_size)
    assert [(h.ids, h.finished) for h in hypotheses] == [(ids, finished) for _, ids, finished in expected]
    torch.testing.assert_close(
        torch.tensor([h.log_prob for h in hypotheses]), torch.tensor([s for s, _, _ in expected])
    )


class Tables:
    """Images with a Markov table each, in which <end> gets more likely at every step.

    ``seen`` gets the number of images at every step.
    """

    def __init__(self, tables: torch.Tensor, seen: list[int]) -> None:
        self.tables, self.seen = tables, seen
        self.image_count = len(tables)

    def __call__(self, tokens, state):
        (count,) = state
        self.seen.append(self.image_count)
        image = torch.arange(self.image_count).repeat_interleave(len(tokens) // self.image_count)
        alphas = torch.stack([tokens.float(), count[:, 0], self.tables[image, 0, 0]], 1)
        log_probs = self.tables[image, tokens]
        log_probs[:, END] += count[:, 0] / 3
        return Step(log_probs, (count + 1,), AttentionTrace(alphas, tokens / 10, tokens + 1))

    def select_images(self, images):
        return Tables(self.tables[images], self.seen)


STRATEGIES = {
    "greedy": lambda step, state, **options: beam_search(step, state, beam_size=1, max_length=30, **options),
    "sample": lambda step, state, **options: sample(step, state, top_k=4, max_length=30, **options),
    "beam": lambda step, state, **options: beam_search(step, state, beam_size=3, max_length=30, **options),
}


def content(hypotheses):
    """Return hypotheses, or nested lists of them, as plain values."""
    if isinstance(hypotheses, list):
        return [content(item) for item in hypotheses]
    return [*list(vars(hypotheses).values())[:4], *(field.tolist() for field in hypotheses.trace[:3])]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_images_are_searched_independently(strategy):
    """Images end at different steps; each has the caption and locations that it has without the batch."""
    tables = torch.stack([table(seed) for seed in range(5)])
    torch.manual_seed(3)
    together = content(STRATEGIES[strategy](Tables(tables, []), start(5)))
    for image, hypotheses in enumerate([[caption] for caption in together] if strategy == "sample" else together):
        for ids, *_, alphas, _, locations in hypotheses:
            assert [a + 1 for a, _, _ in alphas] == locations and len(locations) == len(ids)
        if strategy != "sample":  # whose random numbers depend on the rows before
            alone = content(STRATEGIES[strategy](Tables(tables[image : image + 1], []), start(1)))
            assert hypotheses == alone[0]


def plain_sample(tables: torch.Tensor, captions_each: int, min_length: int) -> list[list[int]]:
    """The words that ``STRATEGIES["sample"]`` draws, one caption at a time, without any batch."""
    uniform = [torch.rand(len(tables) * captions_each, 1, dtype=torch.float64) for _ in range(30)]
    captions = []
    for row in range(len(tables) * captions_each):
        words = [START]
        while len(words) <= 30 and words[-1] != END:
            log_probs = tables[row // captions_each, words[-1]].clone()
            log_probs[END] += (len(words) - 1) / 3
            log_probs[[PAD, START, UNK] + [END] * (len(words) <= min_length)] = float("-inf")
            log_probs[log_probs < log_probs.topk(4).values[-1]] = float("-inf")
            reached = log_probs.softmax(0).cumsum(0, dtype=torch.float64)
            words.append(int(torch.searchsorted(reached, uniform[len(words) - 1][row] * reached[-1], right=True)))
        captions.append([word for word in words[1:] if word != END])
    return captions


@pytest.mark.parametrize(("strategy", "captions_each"), [("greedy", 1), ("sample", 1), ("sample", 3), ("beam", 1)])
@pytest.mark.parametrize("min_length", [0, 4])
def test_captions_do_not_depend_on_images_leaving_the_batch(strategy, captions_each, min_length):
    tables = torch.stack([table(seed) for seed in range(13)])
    tables[::3, :, END] -= 3.0  # some end late
    search, options, seen = STRATEGIES[strategy], {"constraints": Constraints(min_length)}, list[int]()
    torch.manual_seed(3)
    captions = search(Tables(tables, seen), start(13 * captions_each), **options)
    if strategy == "sample":
        torch.manual_seed(3)
        assert [caption.ids for caption in captions] == plain_sample(tables, captions_each, min_length)
    else:
        alone = [search(Tables(tables[image : image + 1], []), start(1), **options)[0] for image in range(13)]
        assert content(captions) == content(alone)
    assert seen[0] == 13 and seen[-1] < 7  # images did leave
    assert seen == sorted(seen, reverse=True)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_alphas_and_log_probs_belong_to_their_word(beam_size):
    log_probs = table(3)
    for h in beam_search(markov(log_probs), start(1), beam_size=beam_size, max_length=MAX_LENGTH)[0]:
        path = [START, *h.ids, *([END] if h.finished else [])]
        assert h.trace.alphas[:, 0].tolist() == path[: len(h.ids)]  # the word read before each word
        assert h.trace.alphas[:, 1].tolist() == list(range(len(h.ids)))
        torch.testing.assert_close(h.trace.betas, torch.tensor(path[: len(h.ids)]) / 10)
        expected = [float(log_probs[a, b]) for a, b in itertools.pairwise(path)]
        torch.testing.assert_close(torch.tensor(h.log_probs), torch.tensor(expected))


def test_unknown_pad_and_start_are_never_produced():
    greedy_for_unknown = torch.full((V, V), -9.0)
    greedy_for_unknown[:, [PAD, START, UNK]] = -0.1
    step = markov(greedy_for_unknown, 2)
    captions = [
        h for size in (1, 4) for image in beam_search(step, start(2), beam_size=size, max_length=4) for h in image
    ]
    captions += sample(step, start(20), max_length=4)
    assert all(i in WORDS for h in captions for i in h.ids)


def test_unfinished_hypotheses_give_a_caption_with_its_last_word():
    never_ends = torch.zeros(V, V)
    never_ends[:, END] = -50.0
    never_ends[:, 5] = 1.0
    (image,) = beam_search(markov(never_ends.log_softmax(-1)), start(1), beam_size=2, max_length=4)
    ((row,),) = beam_search(markov(never_ends.log_softmax(-1)), start(1), beam_size=1, max_length=4)
    for h in (*image, row):
        assert not h.finished and len(h.ids) == len(h.log_probs) == len(h.trace.alphas) == 4
    assert image[0].ids == row.ids == [5, 5, 5, 5]


def test_finished_hypotheses_come_before_more_probable_unfinished_ones():
    (image,) = beam_search(markov(table(4)), start(1), beam_size=6, max_length=2)
    flags = [h.finished for h in image]
    assert flags == sorted(flags, reverse=True) and not all(flags)


def test_minimum_length_holds_for_every_strategy():
    ends_at_once = torch.full((V, V), -5.0)
    ends_at_once[:, END] = 0.0
    step = markov(ends_at_once.log_softmax(-1))
    assert beam_search(step, start(1), beam_size=1, max_length=5)[0][0].ids == []
    for h in (
        beam_search(step, start(1), beam_size=1, max_length=5, constraints=Constraints(3))[0][0],
        sample(step, start(1), max_length=5, constraints=Constraints(3))[0],
        beam_search(step, start(1), beam_size=2, max_length=5, constraints=Constraints(3))[0][0],
    ):
        assert len(h.ids) >= 3


def test_sampling_follows_the_distribution():
    log_probs = table(1)
    first = [h.ids[0] if h.ids else END for h in sample(markov(log_probs), start(20000), max_length=1)]
    allowed = log_probs[START].exp().clone()
    allowed[[PAD, START, UNK]] = 0
    expected = allowed / allowed.sum()
    measured = torch.bincount(torch.tensor(first), minlength=V) / len(first)
    torch.testing.assert_close(measured, expected, atol=0.015, rtol=0)


def test_top_k_and_top_p_remove_improbable_words():
    probabilities = torch.tensor([0, 0, 0.1, 0, 0.5, 0.25, 0.15])
    step = markov(probabilities.log().expand(V, V))

    def drawn(**options):
        return {h.ids[0] if h.ids else END for h in sample(step, start(500), max_length=1, **options)}

    assert drawn() == {END, 4, 5, 6}
    assert drawn(top_k=2) == {4, 5}
    assert drawn(top_p=0.5) == {4}
    assert drawn(top_p=0.76) == {4, 5, 6}
    assert drawn(temperature=0.02) == {4}


@pytest.mark.parametrize("search", [sample, functools.partial(beam_search, beam_size=2)], ids=["sample", "beam"])
def test_a_model_without_a_finite_probability_is_refused_by_every_search(search):
    with pytest.raises(InputError, match="the model gives no word a finite probability"):
        search(markov(torch.full((V, V), float("nan"))), start(1), max_length=MAX_LENGTH)
