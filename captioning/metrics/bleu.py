"""BLEU, and the n-grams of reference sets that it and CIDEr-D count.

Every metric takes captions as word lists, which hold no special token.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array

from captioning.metrics.resampling import Floats

Words = Sequence[str]
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

    def pairs(self, hypotheses: Sequence[Words], images: Sequence[int] | None) -> tuple[Ints, Ints, Ints]:
        """Pair each hypothesis with every reference of its image. ``images`` is as in ``bleu_counts``.

        Returns the indices of the images (hypotheses,), and for each pair the index of its hypothesis (pairs,) and of
        its reference (pairs,). Raises ValueError if there is not one image for each hypothesis.
        """
        image_index = np.asarray(range(len(self.sizes)) if images is None else images, dtype=np.int64)
        if len(hypotheses) != len(image_index):
            raise ValueError(f"each hypothesis needs a reference set, got {len(hypotheses)} and {len(image_index)}")
        sizes = self.sizes[image_index]
        hypothesis_index = np.repeat(np.arange(len(image_index)), sizes)
        positions = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # in the image's references
        return image_index, hypothesis_index, self._first_references[image_index][hypothesis_index] + positions


def bleu_counts(
    hypotheses: Sequence[Words],
    references: Sequence[Sequence[Words]] | ReferenceNGrams,
    images: Sequence[int] | None = None,
) -> Floats:
    """Return the counts that corpus BLEU sums over images.

    Of two references that are equally close in length, the shorter counts. A hypothesis shorter than n words has no
    n-grams; nltk's ``corpus_bleu`` gives it one, which never matches. Raises ValueError if there is not one image for
    each hypothesis, or an image has no reference.

    Args:
        hypotheses: Word lists.
        references: The word lists of each image's references, or their ``ReferenceNGrams``.
        images: The number of each hypothesis' image among ``references``; by default hypothesis i is of image i.

    Returns:
        (hypotheses, 10): matched n-grams, n = 1..4; all n-grams, n = 1..4; words; words of the closest reference.
    """
    ngrams = references if isinstance(references, ReferenceNGrams) else ReferenceNGrams(references)
    image_index, hypothesis_index, reference_index = ngrams.pairs(hypotheses, images)
    counts = np.zeros((len(hypotheses), 2 * ORDERS + 2))
    lengths = np.array([len(words) for words in hypotheses], dtype=np.int64)
    for n, (hypothesis_counts, max_counts) in enumerate(zip(ngrams.count(hypotheses), ngrams.max_counts, strict=True)):
        counts[:, n] = hypothesis_counts[:, : max_counts.shape[1]].minimum(max_counts[image_index]).sum(axis=1)
        counts[:, ORDERS + n] = np.maximum(lengths - n, 0)
    reference_lengths = ngrams.lengths[reference_index]
    order = np.lexsort((reference_lengths, abs(reference_lengths - lengths[hypothesis_index]), hypothesis_index))[::-1]
    counts[:, -2] = lengths
    counts[hypothesis_index[order], -1] = reference_lengths[order]  # the closest one is written last
    return counts


def bleu_metrics(counts: Floats) -> dict[str, float]:
    """Return corpus BLEU, as the COCO toolkit does, of ``bleu_counts`` (10,) that are summed over images.

    Differs from the toolkit for a corpus without a match of n words: BLEU-n is 0 here. The toolkit adds 1e-15 to the
    matches and 1e-9 to the n-grams, so captions that are all shorter than n words get up to a few percent.

    Returns:
        ``bleu1`` .. ``bleu4`` in percent; ``bleu1_no_penalty`` .. without the brevity penalty, as in the paper;
        ``brevity_penalty`` in [0, 1]; ``length_ratio``, words of the hypotheses per word of the closest references.
    """
    metrics: dict[str, float] = {}
    for suffix, penalty in (("", True), ("_no_penalty", False)):
        values = bleu_from_counts(counts, brevity_penalty=penalty).tolist()
        metrics |= {f"bleu{n}{suffix}": value for n, value in enumerate(values, start=1)}
    length_ratio = float(counts[-2] / counts[-1]) if counts[-1] else 0.0
    return metrics | {"brevity_penalty": float(_brevity_penalty(counts)), "length_ratio": length_ratio}


def bleu_from_counts(counts: ArrayLike, *, brevity_penalty: bool = True) -> Floats:
    """Return BLEU-1..4 in percent, (.., 4), of summed ``bleu_counts`` (.., 10)."""
    counts = np.asarray(counts, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_precisions = np.log(counts[..., :ORDERS]) - np.log(counts[..., ORDERS : 2 * ORDERS])
    log_precisions = np.where(counts[..., :ORDERS] > 0, log_precisions, -np.inf)
    values = 100 * np.exp(np.cumsum(log_precisions, axis=-1) / np.arange(1, ORDERS + 1))
    return values * _brevity_penalty(counts)[..., None] if brevity_penalty else values


def sentence_bleu(counts: Floats) -> Floats:
    """Return BLEU-1..4 of single images in percent, (.., 4), from their ``bleu_counts`` (.., 10).

    The counts of n-grams of two words and more are increased by one (Lin and Och 2004), because most captions share no
    four words in a row with a reference. The mean over images is not corpus BLEU.
    """
    return bleu_from_counts(counts + np.array([0, 1, 1, 1, 0, 1, 1, 1, 0, 0]))


def _brevity_penalty(counts: Floats) -> Floats:
    """Return the factor (..) for c words of hypotheses and r of references: exp(1 - r / c), at most 1; 0 for c = 0."""
    hypothesis, reference = counts[..., -2], counts[..., -1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(hypothesis > 0, np.exp(np.minimum(0, 1 - reference / hypothesis)), 0.0)
