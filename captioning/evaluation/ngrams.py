"""The n-grams of reference sets, numbered and counted once, so that thousands of captions are compared with them fast.

What CIDEr-D and BLEU share, in arrays: a training step that rewards 320 sampled captions has milliseconds for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from captioning.evaluation.bleu import ORDERS, Words

Ints = NDArray[np.int64]

_BASE = 1 << 31  # more than there are words or n-grams: two numbers below it make one of 62 bits


@dataclass(frozen=True)
class Matches:
    """The n-grams of one order in M hypotheses, each distinct one of a hypothesis once, and where references have them.

    Attributes:
        row: (N,), which hypothesis.
        ngram: (N,), the n-gram's number; numbers from ``Order.size`` up are n-grams that are not in the index.
        times: (N,), how often the hypothesis has it.
        of: (E,), for each occurrence in a reference of the hypothesis' set: which of the N.
        reference: (E,), which reference of the set.
        reference_times: (E,), how often that reference has it.
    """

    row: Ints
    ngram: Ints
    times: Ints
    of: Ints
    reference: Ints
    reference_times: Ints


@dataclass(frozen=True)
class Order:
    """The n-grams of one n. The arrays of occurrences are parallel and sorted by set, n-gram and reference.

    Attributes:
        keys: (K,) sorted; the number of an n-gram is its place. For n = 1 the word's number, else the number of the
            first n - 1 words and that of the last word in one.
        places: (E,), set x K + n-gram of every distinct n-gram of every reference.
        references: (E,), its reference in the set.
        times: (E,), how often it occurs there.
    """

    keys: Ints
    places: Ints
    references: Ints
    times: Ints

    @property
    def size(self) -> int:
        return len(self.keys)

    def documents(self) -> Ints:
        """(K,), how many reference sets have each n-gram."""
        return np.bincount(np.unique(self.places) % max(self.size, 1), minlength=self.size)


class ReferenceNGrams:
    """An index of the n-grams of reference sets, n = 1..4.

    Args:
        references: the word lists of each image's references.
        known: n-grams to number besides those of the references.

    Attributes:
        orders: one ``Order`` for each n.
        lengths: (sets, references), words of each reference; -1 where a set has fewer.
        counts: (sets,), references of each set.

    Raises:
        ValueError: a set without a reference.
    """

    def __init__(self, references: Sequence[Sequence[Words]], *, known: Iterable[Words] = ()) -> None:
        empty = next((number for number, of_image in enumerate(references) if not of_image), None)
        if empty is not None:
            raise ValueError(f"image {empty} has no reference")
        self.counts = np.array([len(of_image) for of_image in references], dtype=np.int64)
        self.width = int(self.counts.max(initial=0))
        sentences: list[Words] = list(chain.from_iterable(references))
        set_of = np.repeat(np.arange(len(references)), self.counts)
        reference_of = np.arange(len(sentences)) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        self.lengths = np.full((len(references), self.width), -1, dtype=np.int64)
        self.lengths[set_of, reference_of] = [len(words) for words in sentences]
        everything = [*sentences, *known]
        distinct = dict.fromkeys(chain.from_iterable(everything))
        self._words = {word: number for number, word in enumerate(distinct)}
        self.orders: list[Order] = []
        tables: list[Ints] = []
        for sentence, ngrams in _numbered(everything, self._words, tables, learn=True):
            size = len(tables[-1])
            of_references = sentence < len(sentences)
            sentence, ngrams = sentence[of_references], ngrams[of_references]
            places = (set_of[sentence] * size + ngrams) * self.width + reference_of[sentence]
            places, times = np.unique(places, return_counts=True)
            self.orders.append(Order(tables[-1], *np.divmod(places, max(self.width, 1)), times))

    def __len__(self) -> int:
        return len(self.counts)

    def numbered(self, sentences: Sequence[Words]) -> Iterator[tuple[Ints, Ints]]:
        """Yield for n = 1..4 the sentence (N,) and the number (N,) of every n-gram, those not in the index included."""
        return _numbered(sentences, self._words, [order.keys for order in self.orders], learn=False)

    def matches(self, hypotheses: Sequence[Words], sets: Sequence[int] | Ints) -> list[Matches]:
        """Return what each hypothesis shares with the references of its set, for each n.

        Args:
            hypotheses: M word lists.
            sets: M numbers of reference sets; one may stand there many times.
        """
        sets = np.asarray(sets, dtype=np.int64)
        if len(hypotheses) != len(sets):
            raise ValueError(f"each hypothesis needs a reference set, got {len(hypotheses)} and {len(sets)}")
        found = []
        for order, (row, ngrams) in zip(self.orders, self.numbered(hypotheses), strict=True):
            keys, times = np.unique(row * _BASE + ngrams, return_counts=True)
            row, ngrams = keys // _BASE, keys % _BASE
            at = np.flatnonzero(ngrams < order.size)
            place = sets[row[at]] * order.size + ngrams[at]
            first = np.searchsorted(order.places, place, side="left")
            occurrences = np.searchsorted(order.places, place, side="right") - first
            before = np.cumsum(occurrences) - occurrences
            entries = np.arange(occurrences.sum()) + np.repeat(first - before, occurrences)
            of = np.repeat(at, occurrences)
            found.append(Matches(row, ngrams, times, of, order.references[entries], order.times[entries]))
        return found


def bleu_counts_of(index: ReferenceNGrams, hypotheses: Sequence[Words], sets: Sequence[int] | Ints) -> Ints:
    """Return ``bleu.bleu_counts`` (hypotheses, 10) against reference sets that are indexed already."""
    sets = np.asarray(sets, dtype=np.int64)
    counts = np.zeros((len(hypotheses), 2 * ORDERS + 2), dtype=np.int64)
    lengths = np.array([len(words) for words in hypotheses], dtype=np.int64)
    for n, match in enumerate(index.matches(hypotheses, sets)):
        most = np.zeros(len(match.row), dtype=np.int64)
        np.maximum.at(most, match.of, match.reference_times)
        np.add.at(counts[:, n], match.row, np.minimum(match.times, most))
        counts[:, ORDERS + n] = np.maximum(lengths - n, 0)
    references = index.lengths[sets]  # (M, references)
    # The closest length, the shorter of two equally close ones; -1 is no reference.
    distance = np.where(
        references < 0, _BASE, 2 * np.abs(references - lengths[:, None]) + (references > lengths[:, None])
    )
    counts[:, -2] = lengths
    counts[:, -1] = np.take_along_axis(references, distance.argmin(axis=1, keepdims=True), axis=1)[:, 0]
    return counts


def _numbered(
    sentences: Sequence[Words], words: dict[str, int], tables: list[Ints], *, learn: bool
) -> Iterator[tuple[Ints, Ints]]:
    """Yield for n = 1..4 the sentence (N,) and the number (N,) of every n-gram.

    Args:
        sentences: word lists.
        words: word -> number; others are numbered on from its size, as they come.
        tables: sorted keys of the known n-grams, one array for each n; others are numbered on from its size.
        learn: append to ``tables`` what the sentences have, rather than look it up.
    """
    lengths = np.array([len(sentence) for sentence in sentences], dtype=np.int64)
    new: dict[str, int] = {}
    numbers = np.array(
        [
            number if (number := words.get(word)) is not None else new.setdefault(word, len(words) + len(new))
            for word in chain.from_iterable(sentences)
        ],
        dtype=np.int64,
    )
    sentence = np.repeat(np.arange(len(sentences)), lengths)
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(numbers))  # words from here to the sentence's end
    if learn:
        tables.append(np.arange(len(words), dtype=np.int64))
    yield sentence, numbers
    ngrams = numbers.copy()  # of the n-gram that begins at each word, where there is one
    for n in range(2, ORDERS + 1):
        at = np.flatnonzero(left >= n)
        keys = ngrams[at] * _BASE + numbers[at + n - 1]
        if learn:
            tables.append(np.unique(keys))
        table = tables[n - 1]
        place = np.searchsorted(table, keys)
        unknown = np.ones(len(keys), dtype=bool)
        if len(table):
            unknown = table[np.minimum(place, len(table) - 1)] != keys
        if unknown.any():
            place[unknown] = len(table) + np.unique(keys[unknown], return_inverse=True)[1]
        ngrams[at] = place
        yield sentence[at], place
