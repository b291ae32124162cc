"""Constraints and beams against enumeration and plain loops, on random functions of all the words so far."""

import functools
import math
from collections import Counter

import pytest
import torch
from helpers import quick_if

from captioning.decoding import Constraints, Hypothesis, Step, beam_search, sample
from captioning.errors import InputError
from captioning.trace import AttentionTrace
from captioning.vocabulary import END, START

V = 7
WORDS = range(4, V)
MAX_LENGTH = 5


class Histories:
    """A random distribution of the next word after every sequence of words; the seeds of images differ.

    The state is the number of the sequence, its ids as digits of base V.
    """

    def __init__(self, seeds: list[int]) -> None:
        self.seeds, self.image_count = seeds, len(seeds)

    def __call__(self, tokens, state):
        number = state[0] * V + tokens.unsqueeze(1)
        rows = len(tokens) // self.image_count
        log_probs = torch.stack(
            [self.log_probs(self.seeds[row // rows], int(digits)) for row, digits in enumerate(number)]
        )
        return Step(log_probs, (number,), AttentionTrace(number.float(), None, tokens))

    @staticmethod
    @functools.cache
    def log_probs(seed: int, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 10**6 + number)
        return torch.randn(V, generator=generator).mul(1.5).log_softmax(-1)

    def select_images(self, images):
        return Histories([self.seeds[image] for image in images.tolist()])

    def after(self, image: int, words: list[int]) -> list[float]:
        number = 0
        for word in (START, *words):
            number = number * V + word
        return self.log_probs(self.seeds[image], number).tolist()

    def start(self, rows: int = 1):
        return (torch.zeros(self.image_count * rows, 1, dtype=torch.int64),)


def allowed(words: list[int], constraints: Constraints) -> set[int]:
    """The ids that may follow ``words``, in plain Python."""
    if len(words) < len(constraints.prefix):
        return {constraints.prefix[len(words)]}
    n = constraints.no_repeat_ngram
    ngrams = set() if n is None else {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}
    free = {word for word in WORDS if n is None or (words[-1:] != [word] and tuple([*words, word][-n:]) not in ngrams)}
    free -= {word for word in words if constraints.repeatable is not None and word not in constraints.repeatable}
    return free | {END} if len(words) >= constraints.min_length or not free else free


def every_caption(step: Histories, image: int, constraints: Constraints):
    """Log-probability, and probability of being drawn, of all captions; one cut off has MAX_LENGTH words."""
    captions: dict[tuple[int, ...], tuple[float, float]] = {}

    def follow(words: list[int], total: float, drawn: float) -> None:
        if len(words) == MAX_LENGTH or END in words:
            captions[tuple(words)] = (total, drawn)
            return
        log_probs, free = step.after(image, words), allowed(words, constraints)
        mass = sum(math.exp(log_probs[word]) for word in free)
        for word in free:
            follow([*words, word], total + log_probs[word], drawn * math.exp(log_probs[word]) / mass)

    follow([], 0.0, 1.0)
    return captions


def ids_of(hypothesis: Hypothesis) -> tuple[int, ...]:
    return (*hypothesis.ids, *([END] if hypothesis.finished else []))


CONSTRAINTS = {
    "none": Constraints(),
    "min_length": Constraints(min_length=2),
    "unigrams": Constraints(no_repeat_ngram=1),
    "unigrams and a length that they forbid": Constraints(min_length=4, no_repeat_ngram=1),
    "bigrams": Constraints(no_repeat_ngram=2),
    "trigrams": Constraints(min_length=3, no_repeat_ngram=3),
    "prefix": Constraints(prefix=(5, 4)),
    "prefix that repeats": Constraints(prefix=(5, 5, 5), no_repeat_ngram=2),
    "content words": Constraints(repeatable=(5,)),
    "all": Constraints(min_length=3, no_repeat_ngram=2, prefix=(6,)),
}
every_constraint = pytest.mark.parametrize("constraints", CONSTRAINTS.values(), ids=CONSTRAINTS)


@every_constraint
def test_the_widest_beam_has_every_caption_that_meets_the_constraints_and_no_other(constraints):
    step = Histories([1, 2])
    images = beam_search(step, step.start(), beam_size=400, max_length=MAX_LENGTH, constraints=constraints)
    for image, hypotheses in enumerate(images):
        expected = {words: total for words, (total, _) in every_caption(step, image, constraints).items()}
        assert {ids_of(h): h.log_prob for h in hypotheses} == pytest.approx(expected, abs=1e-4)
        finished = {words: total for words, total in expected.items() if words[-1] == END}
        assert ids_of(hypotheses[0]) == max(finished, key=finished.__getitem__)


@pytest.mark.parametrize(
    "constraints",
    [quick_if(name in ("none", "all", "content words"), CONSTRAINTS[name], id=name) for name in CONSTRAINTS],
)
def test_captions_are_sampled_from_the_renormalized_distribution(constraints):
    step, draws = Histories([1, 2]), 4000
    torch.manual_seed(0)
    drawn = sample(step, step.start(draws), max_length=MAX_LENGTH, constraints=constraints)
    for image in range(2):
        counts = Counter(map(ids_of, drawn[image * draws : (image + 1) * draws]))
        captions = every_caption(step, image, constraints)
        assert set(counts) <= set(captions)
        expected = {words: draws * drawn for words, (_, drawn) in captions.items() if draws * drawn >= 5}
        chi_squared = sum((counts[words] - count) ** 2 / count for words, count in expected.items())
        assert chi_squared < len(expected) + 4 * math.sqrt(2 * len(expected))
    by_words = every_caption(step, 0, constraints)
    assert drawn[0].log_prob == pytest.approx(by_words[ids_of(drawn[0])][0], abs=1e-4)  # the model's own


@every_constraint
def test_a_beam_of_one_takes_the_best_word_that_is_allowed(constraints):
    step = Histories([3, 4, 5])
    beams = beam_search(step, step.start(), beam_size=1, max_length=MAX_LENGTH, constraints=constraints)
    for image, (hypothesis,) in enumerate(beams):
        words: list[int] = []
        while len(words) < MAX_LENGTH and END not in words:
            words.append(max(allowed(words, constraints), key=step.after(image, words).__getitem__))
        assert ids_of(hypothesis) == tuple(words)


def plain_beam(step: Histories, image: int, size: int, constraints):
    """Beam search of one image, one hypothesis at a time: a list of (words, log-probability)."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []
    for _ in range(MAX_LENGTH):
        candidates = []
        for words, total in live:
            log_probs = step.after(image, words)
            candidates += [([*words, word], total + log_probs[word]) for word in allowed(words, constraints)]
        best = sorted(candidates, key=lambda item: -item[1])[: size - len(ended)]
        ended += [item for item in best if item[0][-1] == END]
        live = [item for item in best if item[0][-1] != END]
    ranked = [sorted(beams, key=lambda item: -item[1]) for beams in (ended, live)]
    return [(tuple(words), total) for beams in ranked for words, total in beams]


@pytest.mark.parametrize("name", ["none", "bigrams", "all"])
@pytest.mark.parametrize("size", [1, 3, 12])
def test_a_beam_equals_a_plain_loop_over_hypotheses(name, size):
    step, constraints = Histories([1, 2, 3, 4, 5]), CONSTRAINTS[name]
    images = beam_search(step, step.start(), beam_size=size, max_length=MAX_LENGTH, constraints=constraints)
    for image, hypotheses in enumerate(images):
        beam = [(ids_of(h), pytest.approx(h.log_prob, abs=1e-4)) for h in hypotheses]
        assert beam == plain_beam(step, image, size, constraints)


def test_a_prefix_of_max_length_words_is_refused():
    step = Histories([0])
    with pytest.raises(InputError, match="prefix: 2 words leave no room below max_length 2"):
        beam_search(step, step.start(), beam_size=1, max_length=2, constraints=Constraints(prefix=(4, 5)))
