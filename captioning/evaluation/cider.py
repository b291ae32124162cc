"""CIDEr-D (Vedantam et al. 2015): how much a caption has in common with its references, rare words counting more.

The COCO toolkit's numbers, which it calls CIDEr: n-grams without stemming, counts clipped to the reference's, a
Gaussian penalty of the difference in length. Its scale too: 10 for a caption that equals its only reference.
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
from captioning.evaluation.bleu import ORDERS, Words
from captioning.evaluation.ngrams import Ints, ReferenceNGrams
from captioning.files import write_json

Floats = NDArray[np.float64]

SIGMA = 6.0  # words, of the penalty of another length
SCALE = 10.0


@dataclass(frozen=True)
class DocumentFrequencies:
    """In how many of a corpus' reference sets n-grams occur: what makes a word rare.

    Attributes:
        documents: how many reference sets there are.
        counts: n-gram, its words with spaces between them -> how many of the sets have it. Those that one set has are
            left out: n-grams that no set has weigh the same.
    """

    documents: int
    counts: Mapping[str, int]

    @classmethod
    def of(cls, references: Sequence[Sequence[Words]]) -> DocumentFrequencies:
        """Count the n-grams of each image's references.

        Raises:
            ValueError: no image at all.
        """
        if not references:
            raise ValueError("document frequencies need at least one set of references")
        counts: Counter[str] = Counter()
        for of_image in references:
            counts.update(
                {" ".join(w[i : i + n]) for w in of_image for n in range(1, ORDERS + 1) for i in range(len(w) - n + 1)}
            )
        return cls(len(references), {ngram: count for ngram, count in counts.items() if count > 1})

    def save(self, path: Path) -> None:
        """Write ``{"documents": N, "counts": {"a dog": 12, ..}}``."""
        write_json(path, {"documents": self.documents, "counts": dict(self.counts)}, indent=None)

    @classmethod
    def load(cls, path: Path) -> DocumentFrequencies:
        """Read what ``save`` wrote.

        Raises:
            InputError: the file is missing or holds something else.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
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
    """CIDEr-D of captions against sets of references, which are prepared once.

    Args:
        references: the word lists of each image's references.
        frequencies: of another corpus; by default the references' own.

    Raises:
        ValueError: a set without a reference.
    """

    def __init__(
        self, references: Sequence[Sequence[Words]], *, frequencies: DocumentFrequencies | None = None
    ) -> None:
        counts: Mapping[str, int] = frequencies.counts if frequencies else {}
        known = [ngram.split(" ") for ngram in counts]
        self.index = ReferenceNGrams(references, known=known)
        documents = frequencies.documents if frequencies else len(self.index)
        self._log_documents = float(np.log(max(documents, 1)))
        if frequencies:
            of_orders = _given_counts(self.index, known, list(counts.values()))
        else:
            of_orders = [order.documents() for order in self.index.orders]
        self._weights = [self._log_documents - np.log(np.maximum(count, 1)) for count in of_orders]  # idf
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
            sets: which reference set each is compared with; by default the sets in order.

        Raises:
            ValueError: not one set for each hypothesis.
        """
        sets = np.arange(len(self.index)) if sets is None else np.asarray(sets, dtype=np.int64)
        rows, width = len(hypotheses), self.index.width
        references = sets[:, None] * width + np.arange(width)  # (M, references)
        similarity = np.zeros((rows, width))
        for n, match in enumerate(self.index.matches(hypotheses, sets)):
            weights = np.full(len(match.ngram), self._log_documents)
            known = match.ngram < len(self._weights[n])
            weights[known] = self._weights[n][match.ngram[known]]
            values = match.times * weights
            norm = np.bincount(match.row, values**2, minlength=rows)  # (M,)
            theirs = match.reference_times * weights[match.of]
            pair = match.row[match.of] * width + match.reference
            product = np.bincount(pair, np.minimum(values[match.of], theirs) * theirs, minlength=rows * width)
            norms = np.sqrt(norm[:, None] * self._norms[n][references])
            similarity += np.divide(product.reshape(rows, width), norms, out=np.zeros_like(norms), where=norms > 0)
        # The toolkit measures length in bigrams: no word and one word are equally long.
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
        ValueError: lists of different length, or an image without a reference.
    """
    return CiderD(references, frequencies=frequencies).scores(hypotheses)


def _given_counts(index: ReferenceNGrams, known: Sequence[Words], counts: Sequence[int]) -> list[Ints]:
    """(K,) for each n: the count of each n-gram of the index; 0 for those that are not among ``known``."""
    of_orders = []
    lengths = np.array([len(words) for words in known], dtype=np.int64)
    given = np.array(counts, dtype=np.int64)
    for n, (sentence, ngram) in enumerate(index.numbered(known), start=1):
        whole = lengths[sentence] == n
        of_order = np.zeros(index.orders[n - 1].size, dtype=np.int64)
        of_order[ngram[whole]] = given[sentence[whole]]
        of_orders.append(of_order)
    return of_orders


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
