"""ROUGE-L (Lin 2004) as in the COCO toolkit: the longest common subsequence of a caption and its references."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from captioning.evaluation.ngrams import Words
from captioning.evaluation.resampling import Floats

BETA = 1.2  # weight of recall relative to precision


def rouge_l(hypotheses: Sequence[Words], references: Sequence[Sequence[Words]]) -> Floats:
    """Return ROUGE-L in [0, 1] of each image's caption, (images,); the corpus' ROUGE-L is the mean.

    Precision and recall are each the best over the references, possibly of two different ones. A caption without words
    counts as one empty word, as in the toolkit.

    Raises:
        ValueError: The lists differ in length, or an image has no reference.
    """
    values = np.zeros(len(hypotheses))
    for image, (hypothesis, of_image) in enumerate(zip(hypotheses, references, strict=True)):
        words = hypothesis or [""]
        common = [longest_common_subsequence(words, reference or [""]) for reference in of_image]
        precision = max(common) / len(words)
        recall = max(n / max(len(reference), 1) for n, reference in zip(common, of_image, strict=True))
        if precision and recall:
            values[image] = (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)
    return values


def longest_common_subsequence(first: Words, second: Words) -> int:
    """Return the number of words in the longest common subsequence.

    Bit-parallel (Hyyrö 2004): a column of the usual table is one integer, whose bit i is 0 where the table grows by one
    at word i of ``first``.
    """
    places: dict[str, int] = {}
    for place, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << place
    everywhere = column = (1 << len(first)) - 1
    for word in second:
        matched = column & places.get(word, 0)
        column = (column + matched | column - matched) & everywhere
    return len(first) - column.bit_count()
