"""Caption metrics. Strings in, numbers out, so that no special token can leak into a score.

Every score is over word lists as ``tokenizers`` makes them (Penn Treebank rules, lower case, no punctuation),
or over a data set's own tokens where it brings them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words = Sequence[str]

ORDERS = 4  # BLEU-1 .. BLEU-4


def corpus_bleu(hypotheses: Sequence[Words], references: Sequence[Sequence[Words]]) -> dict[str, float]:
    """Return corpus BLEU-1..4 in percent, with and without the brevity penalty, from nltk's n-gram counts.

    The closest reference length counts, the shorter of two equally close ones; a hypothesis shorter than n words has no
    n-grams (nltk's own ``corpus_bleu`` counts one that cannot match). So the figures are those of the COCO toolkit.

    Args:
        hypotheses: one word list per image.
        references: the word lists of each image's references.

    Returns:
        ``bleu1`` .. ``bleu4`` with the penalty, ``bleu1_no_penalty`` .. without it as the paper reports it,
        ``brevity_penalty`` in (0, 1] and ``length_ratio``, hypothesis words over closest reference words.

    Raises:
        ValueError: lists of different length, none at all, or an image without a reference.
    """
    counts = bleu_counts(hypotheses, references).sum(axis=0)
    penalized, plain = bleu_from_counts(counts), bleu_from_counts(counts, brevity_penalty=False)
    scores: dict[str, float] = {}
    for n in range(ORDERS):
        scores[f"bleu{n + 1}"] = float(penalized[n])
        scores[f"bleu{n + 1}_no_penalty"] = float(plain[n])
    scores["brevity_penalty"] = float(_brevity_penalty(counts))
    scores["length_ratio"] = float(counts[-2] / counts[-1]) if counts[-1] else 0.0
    return scores


def bleu_counts(hypotheses: Sequence[Words], references: Sequence[Sequence[Words]]) -> NDArray[np.int64]:
    """Return what corpus BLEU is made of, image by image: the sum of any images' rows gives those images' BLEU.

    Returns:
        (images, 10): n-grams of the hypothesis found in a reference for n = 1..4, n-grams of the hypothesis for
        n = 1..4, words of the hypothesis, words of the closest reference.

    Raises:
        ValueError: lists of different length, none at all, or an image without a reference.
    """
    from nltk.translate.bleu_score import closest_ref_length, modified_precision

    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(f"BLEU needs as many hypotheses as reference lists, got {len(hypotheses)}, {len(references)}")
    counts = np.zeros((len(hypotheses), 2 * ORDERS + 2), dtype=np.int64)
    for image, (hypothesis, image_references) in enumerate(zip(hypotheses, references, strict=True)):
        if not image_references:
            raise ValueError(f"image {image} has no reference")
        for n in range(1, min(ORDERS, len(hypothesis)) + 1):
            precision = modified_precision(image_references, hypothesis, n)
            counts[image, n - 1] = precision.numerator
            counts[image, ORDERS + n - 1] = precision.denominator
        counts[image, -2:] = len(hypothesis), closest_ref_length(image_references, len(hypothesis))
    return counts


def bleu_from_counts(counts: ArrayLike, *, brevity_penalty: bool = True) -> NDArray[np.float64]:
    """Return BLEU-1..4 in percent, (..., 4), of summed ``bleu_counts`` (..., 10)."""
    counts = np.asarray(counts, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_precisions = np.log(counts[..., :ORDERS]) - np.log(counts[..., ORDERS : 2 * ORDERS])
    log_precisions = np.where(counts[..., :ORDERS] > 0, log_precisions, -np.inf)
    scores = 100 * np.exp(np.cumsum(log_precisions, axis=-1) / np.arange(1, ORDERS + 1))
    return scores * _brevity_penalty(counts)[..., None] if brevity_penalty else scores


def sentence_bleu(counts: ArrayLike, n: int = ORDERS) -> NDArray[np.float64]:
    """Return BLEU-n of single images in percent, (...), from their ``bleu_counts`` (..., 10).

    One is added to the counts of n-grams of two words and more (Lin and Och 2004), for most captions have no four words
    in common with a reference. A mean over images of it is not corpus BLEU.

    Raises:
        ValueError: n is not 1 to 4.
    """
    if not 1 <= n <= ORDERS:
        raise ValueError(f"n must be 1 to {ORDERS}, got {n}")
    smoothed = np.array(counts, dtype=np.float64)
    smoothed[..., 1:ORDERS] += 1
    smoothed[..., ORDERS + 1 : 2 * ORDERS] += 1
    return bleu_from_counts(smoothed)[..., n - 1]


def _brevity_penalty(counts: NDArray[np.floating] | NDArray[np.integer]) -> NDArray[np.float64]:
    """(...), exp(1 - r / c) for hypotheses of c words, shorter than the references' r; 0 for c = 0 (nltk's choice)."""
    hypothesis, reference = counts[..., -2].astype(np.float64), counts[..., -1].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        penalty = np.exp(1 - reference / hypothesis)
    return np.where(hypothesis > reference, 1.0, np.where(hypothesis > 0, penalty, 0.0))
