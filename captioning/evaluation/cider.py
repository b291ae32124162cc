"""CIDEr-D (Vedantam et al. 2015): the similarity of a caption and its references, in which rare words count more.

The numbers are those that the COCO toolkit calls CIDEr: n-grams without stemming, counts clipped to the reference's, a
Gaussian penalty on the difference in length, and 10 for a caption that equals its only reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from captioning.errors import InputError
from captioning.evaluation.ngrams import ORDERS, Ints, ReferenceNGrams, Words
from captioning.files import read_json, write_json

Floats = NDArray[np.float64]

SIGMA = 6.0  # words; width of the length penalty
SCALE = 10.0


@dataclass(frozen=True)
class DocumentFrequencies:
    """The number of reference sets of a corpus in which each n-gram occurs.

    Attributes:
        documents: Number of reference sets.
        counts: Number of sets that have an n-gram, by its words with spaces between them. N-grams of a single set are
            left out, since they weigh as much as those of no set.
    """

    documents: int
    counts: dict[str, int]

    @classmethod
    def of(cls, references: Sequence[Sequence[Words]]) -> DocumentFrequencies:
        """Count the n-grams of each image's references."""
        counts: Counter[str] = Counter()
        for of_image in references:
            counts.update(
                {
                    " ".join(words[start : start + n])
                    for words in of_image
                    for n in range(1, ORDERS + 1)
                    for start in range(len(words) - n + 1)
                }
            )
        return cls(len(references), {ngram: count for ngram, count in counts.items() if count > 1})

    def save(self, path: Path) -> None:
        """Write ``{"documents": N, "counts": {"a dog": 12, ..}}``."""
        write_json(path, {"documents": self.documents, "counts": self.counts}, indent=None)

    @classmethod
    def load(cls, path: Path) -> DocumentFrequencies:
        """Read what ``save`` wrote.

        Raises:
            InputError: The file is missing or holds something else.
        """
        try:
            return msgspec.convert(read_json(path), cls)
        except msgspec.ValidationError as error:
            raise InputError(f"{path}: no document frequencies, which captioning prepare writes ({error})") from error


class CiderD:
    """CIDEr-D of captions against sets of references, which are indexed once.

    Args:
        references: The word lists of each image's references.
        frequencies: Document frequencies of another corpus; by default those of the references.

    Raises:
        ValueError: A set has no reference.
    """

    def __init__(
        self, references: Sequence[Sequence[Words]], *, frequencies: DocumentFrequencies | None = None
    ) -> None:
        given: Mapping[str, int] = frequencies.counts if frequencies else {}
        ngrams = [ngram.split(" ") for ngram in given]
        self.index = ReferenceNGrams(references, extra=ngrams)
        documents = frequencies.documents if frequencies else len(self.index)
        self._log_documents = float(np.log(max(documents, 1)))
        self._weights, self._values, self._norms = [], [], []  # for each n: (K,) idf, (references, K), (references,)
        lengths = np.array([len(words) for words in ngrams], dtype=np.int64)
        given_counts = np.array(list(given.values()), dtype=np.int64)
        numbered = self.index.numbered(ngrams)
        for n, (counts, most) in enumerate(zip(self.index.counts, self.index.most(), strict=True), start=1):
            occurrences = (most > 0).sum(axis=0)
            if frequencies:
                ngram, number = (column[lengths[numbered[n - 1][0]] == n] for column in numbered[n - 1])
                occurrences = np.zeros(counts.shape[1], dtype=np.int64)
                occurrences[number] = given_counts[ngram]
            self._weights.append(self._log_documents - np.log(np.maximum(occurrences, 1)))
            self._values.append((counts * self._weights[-1]).tocsr())
            self._norms.append(np.sqrt((self._values[-1] ** 2).sum(axis=1)))

    def values(self, hypotheses: Sequence[Words], sets: Sequence[int] | Ints | None = None) -> Floats:
        """Return CIDEr-D in [0, 10] of each hypothesis, (M,); the corpus' CIDEr-D is the mean.

        Args:
            hypotheses: M word lists.
            sets: Number of each hypothesis' reference set; by default the sets in order.

        Raises:
            ValueError: There is not one set for each hypothesis.
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


def cider_d(
    hypotheses: Sequence[Words],
    references: Sequence[Sequence[Words]],
    *,
    frequencies: DocumentFrequencies | None = None,
) -> Floats:
    """Return CIDEr-D in [0, 10] of each image's caption, (images,); the corpus' CIDEr-D is the mean.

    Raises:
        ValueError: The lists differ in length, or an image has no reference.
    """
    return CiderD(references, frequencies=frequencies).values(hypotheses)
