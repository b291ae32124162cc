"""The n-grams of reference sets, counted once, so that thousands of captions are compared with them fast.

BLEU and CIDEr-D are computed from these counts. A training step rewards 320 sampled captions within milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

Words = Sequence[str]
Ints = NDArray[np.int64]

ORDERS = 4  # n-grams of n = 1 .. 4
_BASE = 1 << 31  # more than there are words or n-grams: two numbers below it make one of 62 bits


class ReferenceNGrams:
    """An index of the n-grams of reference sets, n = 1..4. References are numbered in order, over all sets.

    Args:
        references: The word lists of each image's references.

    Attributes:
        counts: For each n, (references, K) float: how often each of K numbered n-grams occurs in each reference.
        lengths: (references,) words of each reference.
        sizes: (sets,) references of each set.
        first: (sets,) number of each set's first reference.

    Raises:
        ValueError: A set has no reference.
    """

    def __init__(self, references: Sequence[Sequence[Words]]) -> None:
        self.sizes = np.array([len(of_image) for of_image in references], dtype=np.int64)
        if not self.sizes.all():
            raise ValueError(f"image {self.sizes.argmin()} has no reference")
        self.first = np.cumsum(self.sizes) - self.sizes
        sentences: list[Words] = list(chain.from_iterable(references))
        self.lengths = np.array([len(words) for words in sentences], dtype=np.int64)
        self._words = {word: n for n, word in enumerate(dict.fromkeys(chain.from_iterable(sentences)))}
        self._keys: list[Ints] = []
        numbered = _numbered(sentences, self._words, self._keys, learn=True)
        self.counts = [_counts(len(sentences), *occurrences) for occurrences in numbered]
        self._most: list[csr_array] | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def count(self, sentences: Sequence[Words]) -> list[csr_array]:
        """Return for n = 1..4 how often each n-gram occurs in each sentence, (sentences, K or more).

        The columns from K up are n-grams that are not in the index.
        """
        numbered = _numbered(sentences, self._words, self._keys, learn=False)
        return [
            _counts(len(sentences), *occurrences, columns=known.shape[1])
            for occurrences, known in zip(numbered, self.counts, strict=True)
        ]

    def most(self) -> list[csr_array]:
        """Return for n = 1..4 the most often that each n-gram occurs in one reference of each set, (sets, K)."""
        if self._most is None:
            self._most = []
            for counts in self.counts:
                most = counts[self.first]
                for number in range(1, self.sizes.max(initial=0)):
                    most = most.maximum(counts[self.first + np.minimum(number, self.sizes - 1)])
                self._most.append(most)
        return self._most

    def sets_of(self, hypotheses: Sequence[Words], sets: Sequence[int] | Ints | None) -> Ints:
        """Return the number of each hypothesis' set; by default the sets in order.

        Raises:
            ValueError: There is not one set for each hypothesis.
        """
        sets = np.arange(len(self)) if sets is None else np.asarray(sets, dtype=np.int64)
        if len(hypotheses) != len(sets):
            raise ValueError(f"each hypothesis needs a reference set, got {len(hypotheses)} and {len(sets)}")
        return sets

    def pairs(self, sets: Ints) -> tuple[Ints, Ints]:
        """Return the hypothesis (P,) and the reference (P,) of every pair, for hypotheses with these sets."""
        sizes = self.sizes[sets]
        hypothesis = np.repeat(np.arange(len(sets)), sizes)
        within = np.arange(len(hypothesis)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return hypothesis, self.first[sets][hypothesis] + within


def _counts(rows: int, sentence: Ints, ngram: Ints, columns: int = 0) -> csr_array:
    columns = max(columns, int(ngram.max(initial=-1)) + 1)
    return csr_array((np.ones(len(ngram)), (sentence, ngram)), shape=(rows, columns))


def _numbered(
    sentences: Sequence[Words], words: dict[str, int], tables: list[Ints], *, learn: bool
) -> Iterator[tuple[Ints, Ints]]:
    """Yield for n = 1..4 the sentence (N,) and the number (N,) of every n-gram.

    Args:
        sentences: Word lists.
        words: Number of each word; further words are numbered from its size, in the order of appearance.
        tables: For n = 2..4 the sorted keys of the n-grams, whose numbers are their places; further n-grams are
            numbered from its size. A key joins the number of the first n - 1 words and that of the last word.
        learn: Append the n-grams of the sentences to ``tables`` in place of looking them up.
    """
    lengths = np.array([len(sentence) for sentence in sentences], dtype=np.int64)
    everything = list(chain.from_iterable(sentences))
    new = {word: len(words) + n for n, word in enumerate(dict.fromkeys(w for w in everything if w not in words))}
    numbers = np.array([words[word] if word in words else new[word] for word in everything], dtype=np.int64)
    sentence = np.repeat(np.arange(len(sentences)), lengths)
    remaining = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(numbers))  # words up to the sentence's end
    yield sentence, numbers
    ngrams = numbers.copy()  # number of the n-gram that begins at each word
    for n in range(2, ORDERS + 1):
        starts = np.flatnonzero(remaining >= n)
        keys = ngrams[starts] * _BASE + numbers[starts + n - 1]
        if learn:
            tables.append(np.unique(keys))
        table = tables[n - 2]
        place = np.searchsorted(table, keys)
        unknown = np.append(table, -1)[place] != keys
        place[unknown] = len(table) + np.unique(keys[unknown], return_inverse=True)[1]
        ngrams[starts] = place
        yield sentence[starts], place
