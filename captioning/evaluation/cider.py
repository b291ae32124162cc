"""CIDEr-D (Vedantam et al. 2015): the similarity of a caption and its references, in which rare words count more.

The numbers are those that the COCO toolkit calls CIDEr: n-grams without stemming, counts clipped to the reference's, a
Gaussian penalty on the difference in length, and 10 for a caption that equals its only reference.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from captioning.errors import InputError
from captioning.evaluation.ngrams import ORDERS, Ints, ReferenceNGrams, Words
from captioning.files import read_bytes, write_json

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
    counts: Mapping[str, int]

    @classmethod
    def of(cls, references: Sequence[Sequence[Words]]) -> DocumentFrequencies:
        """Count the n-grams of each image's references.

        Raises:
            ValueError: There is no image.
        """
        if not references:
            raise ValueError("document frequencies need at least one set of references")
        counts: Counter[str] = Counter()
        for image_references in references:
            counts.update(
                {
                    " ".join(words[start : start + n])
                    for words in image_references
                    for n in range(1, ORDERS + 1)
                    for start in range(len(words) - n + 1)
                }
            )
        return cls(len(references), {ngram: count for ngram, count in counts.items() if count > 1})

    def save(self, path: Path) -> None:
        """Write ``{"documents": N, "counts": {"a dog": 12, ..}}``."""
        write_json(path, {"documents": self.documents, "counts": dict(self.counts)}, indent=None)

    @classmethod
    def load(cls, path: Path) -> DocumentFrequencies:
        """Read what ``save`` wrote.

        Raises:
            InputError: The file is missing or holds something else.
        """
        try:
            content = json.loads(read_bytes(Path(path)))
            documents, counts = content["documents"], content["counts"]
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError, RecursionError):
            documents, counts = None, None
        if not _is_count(documents) or not isinstance(counts, dict):
            raise InputError(f'{path}: no document frequencies, expected {{"documents": N, "counts": {{..}}}}')
        for ngram, count in counts.items():
            if not _is_count(count) or count > documents or not 1 <= len(ngram.split(" ")) <= ORDERS:
                raise InputError(f"{path}: {ngram!r} is in {count!r} of {documents} sets; expected n-grams and counts")
        return cls(documents, counts)


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
        counts: Mapping[str, int] = frequencies.counts if frequencies else {}
        ngrams = [ngram.split(" ") for ngram in counts]
        self.index = ReferenceNGrams(references, extra=ngrams)
        documents = frequencies.documents if frequencies else len(self.index)
        self._log_documents = float(np.log(max(documents, 1)))
        if frequencies:
            documents_by_order = _given_counts(self.index, ngrams, list(counts.values()))
        else:
            documents_by_order = [order.documents() for order in self.index.orders]
        self._weights = [self._log_documents - np.log(np.maximum(count, 1)) for count in documents_by_order]  # idf
        self._norms = []  # (sets * references,) for each n, squared
        for order, weights in zip(self.index.orders, self._weights, strict=True):
            image, ngram = np.divmod(order.places, max(order.size, 1))
            squares = (order.times * weights[ngram]) ** 2
            reference = image * self.index.width + order.references
            self._norms.append(np.bincount(reference, squares, minlength=self.index.lengths.size))

    def scores(self, hypotheses: Sequence[Words], sets: Sequence[int] | Ints | None = None) -> Floats:
        """Return CIDEr-D in [0, 10] of each hypothesis, (M,); the corpus' CIDEr-D is the mean.

        Args:
            hypotheses: M word lists.
            sets: Number of each hypothesis' reference set; by default the sets in order.

        Raises:
            ValueError: There is not one set for each hypothesis.
        """
        sets = np.arange(len(self.index)) if sets is None else np.asarray(sets, dtype=np.int64)
        M, width = len(hypotheses), self.index.width
        references = sets[:, None] * width + np.arange(width)  # (M, references)
        similarity = np.zeros((M, width))
        for n, matches in enumerate(self.index.matches(hypotheses, sets)):
            weights = np.full(len(matches.ngram), self._log_documents)
            indexed = matches.ngram < len(self._weights[n])
            weights[indexed] = self._weights[n][matches.ngram[indexed]]
            values = matches.times * weights
            norm = np.bincount(matches.hypothesis, values**2, minlength=M)  # (M,)
            reference_values = matches.reference_times * weights[matches.match]
            clipped = np.minimum(values[matches.match], reference_values)
            pair = matches.hypothesis[matches.match] * width + matches.reference
            product = np.bincount(pair, clipped * reference_values, minlength=M * width)
            norms = np.sqrt(norm[:, None] * self._norms[n][references])
            similarity += np.divide(product.reshape(M, width), norms, out=np.zeros_like(norms), where=norms > 0)
        # The toolkit measures length in bigrams, so no word and one word are equally long.
        lengths = np.maximum([len(words) - 1 for words in hypotheses], 0)
        difference = lengths[:, None] - np.maximum(self.index.lengths[sets] - 1, 0)
        similarity *= np.exp(-(difference**2) / (2 * SIGMA**2))
        return SCALE * similarity.sum(axis=1) / (ORDERS * self.index.counts[sets])


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
    return CiderD(references, frequencies=frequencies).scores(hypotheses)


def _given_counts(index: ReferenceNGrams, ngrams: Sequence[Words], counts: Sequence[int]) -> list[Ints]:
    """Return for each n the count of each n-gram of the index, (K,); 0 if it is not among ``ngrams``."""
    counts_by_order = []
    lengths = np.array([len(words) for words in ngrams], dtype=np.int64)
    given = np.array(counts, dtype=np.int64)
    for n, (sentence, number) in enumerate(index.numbered(ngrams), start=1):
        whole = lengths[sentence] == n
        order_counts = np.zeros(index.orders[n - 1].size, dtype=np.int64)
        order_counts[number[whole]] = given[sentence[whole]]
        counts_by_order.append(order_counts)
    return counts_by_order


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
