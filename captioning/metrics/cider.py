"""CIDEr-D (Vedantam et al. 2015): the similarity of a caption and its references, in which rare words count more.

The COCO toolkit calls it CIDEr: n-grams without stemming, counts clipped to the reference's, a Gaussian penalty on the
difference in length, and 10 for a caption that equals its only reference.
"""

from collections.abc import Sequence

import numpy as np
from scipy.sparse.linalg import norm

from captioning.metrics.arrays import Floats, ratio
from captioning.metrics.ngrams import ORDERS, ReferenceNGrams, Words

SIGMA = 6.0  # words; standard deviation of the Gaussian penalty
SCALE = 10.0  # the value of a caption that equals its only reference


class CiderD:
    """CIDEr-D of captions. The references of the images are indexed once and give the document frequencies.

    Raises ValueError if an image has no reference.
    """

    def __init__(self, references: Sequence[Sequence[Words]]) -> None:
        self.ngrams = ReferenceNGrams(references)
        self._log_documents = float(np.log(max(len(references), 1)))
        # For each n: the inverse document frequencies (n-grams,) and the references' vectors (references, n-grams).
        self._idf = [self._log_documents - np.log((counts > 0).sum(axis=0)) for counts in self.ngrams.max_counts]
        self._tf_idf = [(counts * idf).tocsr() for counts, idf in zip(self.ngrams.counts, self._idf, strict=True)]

    def values(self, hypotheses: Sequence[Words], image_rows: Sequence[int] | None = None) -> Floats:
        """Return CIDEr-D in [0, 10] of each hypothesis, (hypotheses,); the corpus' CIDEr-D is the mean.

        ``image_rows`` is as in ``bleu_counts``. Raises ValueError if there is not one image for each hypothesis.
        """
        image_index, hypothesis_index, reference_index = self.ngrams.pairs(hypotheses, image_rows)
        similarity = np.zeros(len(hypothesis_index))
        for counts, idf, reference_tf_idf in zip(self.ngrams.count(hypotheses), self._idf, self._tf_idf, strict=True):
            idf_of_unseen = np.full(counts.shape[1] - len(idf), self._log_documents)
            tf_idf = (counts * np.append(idf, idf_of_unseen)).tocsr()
            first, second = tf_idf[:, : len(idf)][hypothesis_index], reference_tf_idf[reference_index]
            products = (first.minimum(second) * second).sum(axis=1)
            similarity += ratio(products, norm(tf_idf, axis=1)[hypothesis_index] * norm(second, axis=1))
        # The toolkit measures length in bigrams, so no word and one word are equally long.
        lengths = np.array([max(len(words) - 1, 0) for words in hypotheses], dtype=np.int64)
        difference = lengths[hypothesis_index] - np.maximum(self.ngrams.lengths[reference_index] - 1, 0)
        similarity *= np.exp(-(difference**2) / (2 * SIGMA**2))
        sums = np.bincount(hypothesis_index, similarity, minlength=len(image_index))
        return SCALE * sums / (ORDERS * self.ngrams.sizes[image_index])
