"""BLEU, from counts of n-grams that are summed over images."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from captioning.metrics.arrays import Floats
from captioning.metrics.ngrams import ORDERS, ReferenceNGrams, Words


def bleu_counts(
    hypotheses: Sequence[Words],
    references: Sequence[Sequence[Words]] | ReferenceNGrams,
    image_rows: Sequence[int] | None = None,
) -> Floats:
    """Return the counts that corpus BLEU sums over images.

    Of two references that are equally close in length, the shorter counts. A hypothesis shorter than n words has no
    n-grams; nltk's ``corpus_bleu`` gives it one, which never matches. Raises ValueError if there is not one image for
    each hypothesis, or an image has no reference.

    Args:
        hypotheses: Word lists.
        references: The word lists of each image's references, or their ``ReferenceNGrams``.
        image_rows: The row of each hypothesis' image in ``references``; by default hypothesis i is of image i.

    Returns:
        (hypotheses, 10): matched n-grams, n = 1..4; all n-grams, n = 1..4; words; words of the closest reference.
    """
    ngrams = references if isinstance(references, ReferenceNGrams) else ReferenceNGrams(references)
    image_index, hypothesis_index, reference_index = ngrams.pairs(hypotheses, image_rows)
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
