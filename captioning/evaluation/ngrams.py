"""The n-grams of reference sets, counted once, so that thousands of captions are compared with them fast.

BLEU and CIDEr-D are computed from these counts. A training step rewards 320 sampled captions within milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        most: For each n, (sets, K): the most often that each n-gram occurs in one reference of each set.
        lengths: (references,) words of each reference.
        sizes: (sets,) references of each set.

    Raises:
        ValueError: A set has no reference.
    """

    def __init__(self, references: Sequence[Sequence[Words]]) -> None:
        self.sizes = np.array([len(of_image) for of_image in references], dtype=np.int64)
        if not self.sizes.all():
            raise ValueError(f"image {self.sizes.argmin()} has no reference")
        self._first = np.cumsum(self.sizes) - self.sizes  # number of each set's first reference
        sentences: list[Words] = list(chain.from_iterable(references))
        self.lengths = np.array([len(words) for words in sentences], dtype=np.int64)
        self._words = {word: n for n, word in enumerate(dict.fromkeys(chain.from_iterable(sentences)))}
        self._tables: list[Ints] = []  # for each n the sorted keys of the n-grams, whose numbers are their places
        self.counts = self.count(sentences)
        self.most = [self._most(counts) for counts in self.counts]

    def _most(self, counts: csr_array) -> csr_array:
        most = counts[self._first]
        for number in range(1, self.sizes.max(initial=0)):
            most = most.maximum(counts[self._first + np.minimum(number, self.sizes - 1)])
        return most

    def count(self, sentences: Sequence[Words]) -> list[csr_array]:
        """Return for n = 1..4 how often each n-gram occurs in each sentence, (sentences, K or more).

        The columns from K up are n-grams that are not in the index.
        """
        known, new = self._words, dict[str, int]()
        lengths = np.array([len(sentence) for sentence in sentences], dtype=np.int64)
        numbers = np.array(
            [
                known[word] if word in known else new.setdefault(word, len(known) + len(new))
                for word in chain.from_iterable(sentences)
            ],
            dtype=np.int64,
        )
        sentence = np.repeat(np.arange(len(sentences)), lengths)
        remaining = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(numbers))  # words up to the sentence's end
        ngrams = np.zeros_like(numbers)  # number of the n-gram that begins at each word
        counts = []
        for n in range(1, ORDERS + 1):
            starts = np.flatnonzero(remaining >= n)
            # A key joins the number of the first n - 1 words and that of the last word.
            keys = ngrams[starts] * _BASE + numbers[starts + n - 1]
            if len(self._tables) < n:  # the references themselves
                self._tables.append(np.unique(keys))
            table = self._tables[n - 1]
            place = np.searchsorted(table, keys)
            unknown = np.append(table, -1)[place] != keys
            place[unknown] = len(table) + np.unique(keys[unknown], return_inverse=True)[1]
            ngrams[starts] = place
            shape = len(sentences), max(len(table), int(place.max(initial=-1)) + 1)
            counts.append(csr_array((np.ones(len(place)), (sentence[starts], place)), shape=shape))
        return counts

    def pairs(self, hypotheses: Sequence[Words], sets: Sequence[int] | Ints | None = None) -> tuple[Ints, Ints, Ints]:
        """Return each hypothesis' set (M,), by default the sets in order, and all pairs with its references.

        Returns:
            The sets, and the hypothesis (P,) and the reference (P,) of every pair.

        Raises:
            ValueError: There is not one set for each hypothesis.
        """
        sets = np.arange(len(self.sizes)) if sets is None else np.asarray(sets, dtype=np.int64)
        if len(hypotheses) != len(sets):
            raise ValueError(f"each hypothesis needs a reference set, got {len(hypotheses)} and {len(sets)}")
        sizes = self.sizes[sets]
        hypothesis = np.repeat(np.arange(len(sets)), sizes)
        within = np.arange(len(hypothesis)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return sets, hypothesis, self._first[sets][hypothesis] + within
