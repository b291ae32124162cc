"""BLEU. As for every metric, captions are word lists, so that no special token can leak into it.

The words come from ``tokenizers`` (Penn Treebank rules, lower case, no punctuation), or are a data set's own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from captioning.evaluation.ngrams import ORDERS, Ints, ReferenceNGrams, Words


def bleu_counts(
    hypotheses: Sequence[Words],
    references: Sequence[Sequence[Words]] | ReferenceNGrams,
    sets: Sequence[int] | Ints | None = None,
) -> Ints:
    """Return the counts that corpus BLEU sums over images.

    The closest reference length counts, the shorter of two equally close ones. A hypothesis shorter than n words has no
    n-grams (nltk's ``corpus_bleu`` counts one that cannot match).

    Args:
        hypotheses: M word lists.
        references: The word lists of each image's references, or their index.
        sets: Number of each hypothesis' image among the references; by default the images in order.

    Returns:
        (M, 10): n-grams of the hypothesis that a reference has, for n = 1..4; n-grams of the hypothesis, for
        n = 1..4; words of the hypothesis; words of the closest reference.

    Raises:
        ValueError: There is not one image for each hypothesis, or an image has no reference.
    """
    index = references if isinstance(references, ReferenceNGrams) else ReferenceNGrams(references)
    sets, hypothesis, reference = index.pairs(hypotheses, sets)
    counts = np.zeros((len(hypotheses), 2 * ORDERS + 2), dtype=np.int64)
    lengths = np.array([len(words) for words in hypotheses], dtype=np.int64)
    for n, (own, most) in enumerate(zip(index.count(hypotheses), index.most, strict=True)):
        counts[:, n] = own[:, : most.shape[1]].minimum(most[sets]).sum(axis=1)
        counts[:, ORDERS + n] = np.maximum(lengths - n, 0)
    closest = np.lexsort((index.lengths[reference], abs(index.lengths[reference] - lengths[hypothesis]), hypothesis))
    counts[:, -2] = lengths
    counts[hypothesis[closest][::-1], -1] = index.lengths[reference[closest]][::-1]  # the closest one is written last
    return counts


def bleu_metrics(counts: ArrayLike) -> dict[str, float]:
    """Return corpus BLEU, the numbers of the COCO toolkit, of ``bleu_counts`` (10,) that are summed over images.

    Differs from the toolkit for a corpus without a single match of n words, whose BLEU-n is 0 here. The toolkit takes
    1e-15 for 0 matches, and 1e-9 for 0 n-grams, so that it scores up to a few percent where no caption has n words.

    Returns:
        ``bleu1`` .. ``bleu4`` in percent, ``bleu1_no_penalty`` .. without brevity penalty as the paper reports it,
        ``brevity_penalty`` in (0, 1] and ``length_ratio``, hypothesis words over closest reference words.
    """
    counts = np.asarray(counts, dtype=np.float64)
    metrics: dict[str, float] = {}
    for suffix, penalty in (("", True), ("_no_penalty", False)):
        values = bleu_from_counts(counts, brevity_penalty=penalty).tolist()
        metrics |= {f"bleu{n}{suffix}": value for n, value in enumerate(values, start=1)}
    length_ratio = float(counts[-2] / counts[-1]) if counts[-1] else 0.0
    return metrics | {"brevity_penalty": float(_brevity_penalty(counts)), "length_ratio": length_ratio}


def bleu_from_counts(counts: ArrayLike, *, brevity_penalty: bool = True) -> NDArray[np.float64]:
    """Return BLEU-1..4 in percent, (..., 4), of summed ``bleu_counts`` (..., 10)."""
    counts = np.asarray(counts, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_precisions = np.log(counts[..., :ORDERS]) - np.log(counts[..., ORDERS : 2 * ORDERS])
    log_precisions = np.where(counts[..., :ORDERS] > 0, log_precisions, -np.inf)
    values = 100 * np.exp(np.cumsum(log_precisions, axis=-1) / np.arange(1, ORDERS + 1))
    return values * _brevity_penalty(counts)[..., None] if brevity_penalty else values


def sentence_bleu(counts: ArrayLike) -> NDArray[np.float64]:
    """Return BLEU-1..4 of single images in percent, (..., 4), from their ``bleu_counts`` (..., 10).

    The counts of n-grams with two words and more are increased by one (Lin and Och 2004), since most captions have no
    four words in a row in common with a reference. Its mean over images is not corpus BLEU.
    """
    return bleu_from_counts(np.asarray(counts) + np.array([0, 1, 1, 1, 0, 1, 1, 1, 0, 0]))


def _brevity_penalty(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return exp(1 - r / c), (...), where hypotheses have c words and references r > c; 0 for c = 0, as nltk does."""
    hypothesis, reference = counts[..., -2], counts[..., -1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(hypothesis > 0, np.exp(np.minimum(0, 1 - reference / hypothesis)), 0.0)
