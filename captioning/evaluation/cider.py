"""CIDEr-D (Vedantam et al. 2015): the similarity of a caption and its references, in which rare words count more.

The numbers are those that the COCO toolkit calls CIDEr: n-grams without stemming, counts clipped to the reference's, a
Gaussian penalty on the difference in length, and 10 for a caption that equals its only reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from captioning.evaluation.ngrams import ORDERS, Ints, ReferenceNGrams, Words
from captioning.evaluation.resampling import Floats

SIGMA = 6.0  # words; width of the length penalty
SCALE = 10.0


class CiderD:
    """CIDEr-D of captions against sets of references, which are indexed once and give the document frequencies.

    Args:
        references: The word lists of each image's references.

    Raises:
        ValueError: A set has no reference.
    """

    def __init__(self, references: Sequence[Sequence[Words]]) -> None:
        self.index = ReferenceNGrams(references)
        self._log_documents = float(np.log(max(len(self.index), 1)))
        self._weights, self._values, self._norms = [], [], []  # for each n: (K,) idf, (references, K), (references,)
        for counts, most in zip(self.index.counts, self.index.most(), strict=True):
            documents = (most > 0).sum(axis=0)
            self._weights.append(self._log_documents - np.log(documents))
            self._values.append((counts * self._weights[-1]).tocsr())
            self._norms.append(np.sqrt((self._values[-1] ** 2).sum(axis=1)))

    def values(self, hypotheses: Sequence[Words], sets: Sequence[int] | Ints | None = None) -> Floats:
        """Return CIDEr-D in [0, 10] of each hypothesis, (M,); the corpus' CIDEr-D is the mean.

        Args:
            hypotheses: M word lists.
            sets: Number of each hypothesis' reference set; by default the sets in order.
        """
        sets = self.index.sets_of(hypotheses, sets)
        hypothesis, reference = self.index.pairs(sets)  # (P,)
        similarity = np.zeros(len(hypothesis))
        for n, counts in enumerate(self.index.count(hypotheses)):
            known = len(self._weights[n])
            weights = np.append(self._weights[n], np.full(counts.shape[1] - known, self._log_documents))
            values = (counts * weights).tocsr()
            norms = np.sqrt((values**2).sum(axis=1))[hypothesis] * self._norms[n][reference]
            own, other = values[:, :known][hypothesis], self._values[n][reference]
            product = (own.minimum(other) * other).sum(axis=1)
            similarity += np.divide(product, norms, out=np.zeros_like(norms), where=norms > 0)
        # The toolkit measures length in bigrams, so no word and one word are equally long.
        lengths = np.array([max(len(words) - 1, 0) for words in hypotheses], dtype=np.int64)
        difference = lengths[hypothesis] - np.maximum(self.index.lengths[reference] - 1, 0)
        similarity *= np.exp(-(difference**2) / (2 * SIGMA**2))
        return SCALE * np.bincount(hypothesis, similarity, minlength=len(sets)) / (ORDERS * self.index.sizes[sets])


def cider_d(hypotheses: Sequence[Words], references: Sequence[Sequence[Words]]) -> Floats:
    """Return CIDEr-D in [0, 10] of each image's caption, (images,); the corpus' CIDEr-D is the mean.

    Raises:
        ValueError: The lists differ in length, or an image has no reference.
    """
    return CiderD(references).values(hypotheses)
