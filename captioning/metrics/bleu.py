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
        counts: For each n, (references, K) float: how often each of K numbered n-grams occurs in each reference.
        max_counts: For each n, (images, K): the greatest count of each n-gram in one reference of each image.
        lengths: (references,) words of each reference.
        sizes: (images,) references of each image.
    """

    def __init__(self, references: Sequence[Sequence[Words]]) -> None:
        self.sizes = np.array([len(image_references) for image_references in references], dtype=np.int64)
        if not self.sizes.all():
            raise ValueError(f"image {self.sizes.argmin()} has no reference")
        self._first = np.cumsum(self.sizes) - self.sizes  # number of each image's first reference
        sentences: list[Words] = list(chain.from_iterable(references))
        self.lengths = np.array([len(words) for words in sentences], dtype=np.int64)
        self._words = {word: n for n, word in enumerate(dict.fromkeys(chain.from_iterable(sentences)))}
        self._tables: list[Ints] = []  # for each n the sorted keys; an n-gram's number is its key's position
        self.counts = self.count(sentences)
        self.max_counts = [self._max_counts(counts) for counts in self.counts]

    def _max_counts(self, counts: csr_array) -> csr_array:
        max_counts = counts[self._first]
        for number in range(1, self.sizes.max(initial=0)):
            max_counts = max_counts.maximum(counts[self._first + np.minimum(number, self.sizes - 1)])
        return max_counts

    def count(self, sentences: Sequence[Words]) -> list[csr_array]:
        """Return for n = 1..4 the counts of each n-gram in each sentence, (sentences, K or more).

        Columns from K on belong to n-grams that no reference has.
        """
        number_of: dict[str, int] = defaultdict(lambda: len(number_of), self._words)  # a new word gets the next number
        numbers = np.array([number_of[word] for word in chain.from_iterable(sentences)], dtype=np.int64)
        lengths = np.array([len(sentence) for sentence in sentences], dtype=np.int64)
        sentence = np.repeat(np.arange(len(sentences)), lengths)
        remaining = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(numbers))  # words up to the sentence's end
        ngrams = np.zeros_like(numbers)  # number of the n-gram that begins at each word
        counts = []
        for n in range(1, ORDERS + 1):
            starts = np.flatnonzero(remaining >= n)
            # A key joins the number of the first n - 1 words and the number of the last word.
            keys = ngrams[starts] * _BASE + numbers[starts + n - 1]
            if len(self._tables) < n:  # the references themselves
                self._tables.append(np.unique(keys))
            table = self._tables[n - 1]
            position = np.searchsorted(table, keys)
            unknown = np.append(table, -1)[position] != keys
            position[unknown] = len(table) + np.unique(keys[unknown], return_inverse=True)[1]
            ngrams[starts] = position
            shape = len(sentences), max(len(table), int(position.max(initial=-1)) + 1)
            counts.append(csr_array((np.ones(len(position)), (sentence[starts], position)), shape=shape))
        return counts

    def pairs(self, hypotheses: Sequence[Words], images: Sequence[int] | None) -> tuple[Ints, Ints, Ints]:
        """Return the image (M,) of each hypothesis, by default in order, and P pairs of hypothesis and reference.

        The pairs are two arrays: the hypotheses (P,) and the references (P,). Raises ValueError if there is not one
        image for each hypothesis.
        """
        numbers = np.asarray(range(len(self.sizes)) if images is None else images, dtype=np.int64)
        if len(hypotheses) != len(numbers):
            raise ValueError(f"each hypothesis needs a reference set, got {len(hypotheses)} and {len(numbers)}")
        sizes = self.sizes[numbers]
        hypothesis = np.repeat(np.arange(len(numbers)), sizes)
        within = np.arange(len(hypothesis)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return numbers, hypothesis, self._first[numbers][hypothesis] + within


def bleu_counts(
    hypotheses: Sequence[Words],
    references: Sequence[Sequence[Words]] | ReferenceNGrams,
    images: Sequence[int] | None = None,
) -> Floats:
    """Return the counts that corpus BLEU sums over images.

    The closest reference length counts: of two equally close lengths, the shorter. A hypothesis shorter than n words
    has no n-grams; nltk's ``corpus_bleu`` counts one n-gram that cannot match. Raises ValueError if there is not one
    image for each hypothesis, or an image has no reference.

    Args:
        hypotheses: M word lists.
        references: The word lists of each image's references, or their index.
        images: Number of each hypothesis' image among the references; by default the images in order.

    Returns:
        (M, 10): matched n-grams, n = 1..4; the hypothesis' n-grams, n = 1..4, and words; the closest reference's words.
    """
    index = references if isinstance(references, ReferenceNGrams) else ReferenceNGrams(references)
    numbers, hypothesis, reference = index.pairs(hypotheses, images)
    counts = np.zeros((len(hypotheses), 2 * ORDERS + 2))
    lengths = np.array([len(words) for words in hypotheses], dtype=np.int64)
    for n, (hypothesis_counts, max_counts) in enumerate(zip(index.count(hypotheses), index.max_counts, strict=True)):
        counts[:, n] = hypothesis_counts[:, : max_counts.shape[1]].minimum(max_counts[numbers]).sum(axis=1)
        counts[:, ORDERS + n] = np.maximum(lengths - n, 0)
    closest = np.lexsort((index.lengths[reference], abs(index.lengths[reference] - lengths[hypothesis]), hypothesis))
    counts[:, -2] = lengths
    counts[hypothesis[closest][::-1], -1] = index.lengths[reference[closest]][::-1]  # the closest one is written last
    return counts


def bleu_metrics(counts: Floats) -> dict[str, float]:
    """Return corpus BLEU, as the COCO toolkit does, of ``bleu_counts`` (10,) that are summed over images.

    Differs from the toolkit for a corpus without a match of n words: BLEU-n is 0 here. The toolkit takes 1e-15 for 0
    matches and 1e-9 for 0 n-grams, which scores up to a few percent where no caption has n words.

    Returns:
        ``bleu1`` .. ``bleu4`` in percent, ``bleu1_no_penalty`` .. without brevity penalty as the paper reports it,
        ``brevity_penalty`` in (0, 1], and ``length_ratio``: hypothesis words over closest reference words.
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
    """Return exp(1 - r / c), (..), where hypotheses have c words and references r > c; 0 for c = 0, as nltk does."""
    hypothesis, reference = counts[..., -2], counts[..., -1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(hypothesis > 0, np.exp(np.minimum(0, 1 - reference / hypothesis)), 0.0)
