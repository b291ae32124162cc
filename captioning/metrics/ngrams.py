"""The n-grams of captions and of their references, which BLEU and CIDEr-D count."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

Words = Sequence[str]  # of a caption or a reference, without special tokens
Ints = NDArray[np.int64]

ORDERS = 4  # n-grams of n = 1 .. 4
_BASE = 1 << 31  # above the number of any word or n-gram: two such numbers fit into 62 bits


class ReferenceNGrams:
    """The n-grams of each image's references, counted once for many comparisons.

    References are numbered in order, over all images. Raises ValueError if an image has no reference.

    Attributes:
        counts: For each n, (references, n-grams) float: how often each n-gram occurs in each reference.
        max_counts: For each n, (images, n-grams): the greatest count of each n-gram in one reference of each image.
        lengths: (references,) number of words of each reference.
        sizes: (images,) number of references of each image.
    """

    def __init__(self, references: Sequence[Sequence[Words]]) -> None:
        self.sizes = np.array([len(image_references) for image_references in references], dtype=np.int64)
        if not self.sizes.all():
            raise ValueError(f"image {self.sizes.argmin()} has no reference")
        self._first_references = np.cumsum(self.sizes) - self.sizes  # the number of each image's first reference
        sentences: list[Words] = list(chain.from_iterable(references))
        self.lengths = np.array([len(words) for words in sentences], dtype=np.int64)
        self._word_numbers = {word: n for n, word in enumerate(dict.fromkeys(chain.from_iterable(sentences)))}
        self._keys: list[Ints] = []  # for each n, sorted; an n-gram's number is the position of its key
        self.counts = self.count(sentences)
        self.max_counts = [self._max_over_references(counts) for counts in self.counts]

    def _max_over_references(self, counts: csr_array) -> csr_array:
        max_counts = counts[self._first_references]
        for i in range(1, self.sizes.max(initial=0)):
            max_counts = max_counts.maximum(counts[self._first_references + np.minimum(i, self.sizes - 1)])
        return max_counts

    def count(self, sentences: Sequence[Words]) -> list[csr_array]:
        """Return for n = 1..4 the counts of each n-gram in each sentence, (sentences, n-grams).

        The columns of the references' n-grams come first; n-grams that no reference has follow.
        """
        number_of: dict[str, int] = defaultdict(lambda: len(number_of), self._word_numbers)  # new words follow
        numbers = np.array([number_of[word] for word in chain.from_iterable(sentences)], dtype=np.int64)
        lengths = np.array([len(words) for words in sentences], dtype=np.int64)
        sentence_index = np.repeat(np.arange(len(sentences)), lengths)  # of each word
        remaining = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(numbers))  # words up to the sentence's end
        ngrams = np.zeros_like(numbers)  # the number of the n-gram that begins at each word
        counts = []
        for n in range(1, ORDERS + 1):
            starts = np.flatnonzero(remaining >= n)
            # A key joins the number of the first n - 1 words and the number of the last word.
            keys = ngrams[starts] * _BASE + numbers[starts + n - 1]
            if len(self._keys) < n:  # the sentences are the references themselves
                self._keys.append(np.unique(keys))
            known_keys = self._keys[n - 1]
            positions = np.searchsorted(known_keys, keys)
            is_new = np.append(known_keys, -1)[positions] != keys
            positions[is_new] = len(known_keys) + np.unique(keys[is_new], return_inverse=True)[1]
            ngrams[starts] = positions
            shape = len(sentences), max(len(known_keys), int(positions.max(initial=-1)) + 1)
            counts.append(csr_array((np.ones(len(positions)), (sentence_index[starts], positions)), shape=shape))
        return counts

    def pairs(self, hypotheses: Sequence[Words], image_rows: Sequence[int] | None) -> tuple[Ints, Ints, Ints]:
        """Pair each hypothesis with every reference of its image. ``image_rows`` is as in ``bleu_counts``.

        Returns the indices of the images (hypotheses,), and for each pair the index of its hypothesis (pairs,) and of
        its reference (pairs,). Raises ValueError if there is not one image for each hypothesis.
        """
        image_index = np.asarray(range(len(self.sizes)) if image_rows is None else image_rows, dtype=np.int64)
        if len(hypotheses) != len(image_index):
            raise ValueError(f"each hypothesis needs a reference set, got {len(hypotheses)} and {len(image_index)}")
        sizes = self.sizes[image_index]
        hypothesis_index = np.repeat(np.arange(len(image_index)), sizes)
        positions = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # in the image's references
        return image_index, hypothesis_index, self._first_references[image_index][hypothesis_index] + positions
