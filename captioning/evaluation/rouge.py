"""ROUGE-L (Lin 2004) as the COCO toolkit has it: the longest common subsequence of a caption and its references."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from captioning.evaluation.bleu import Words

BETA = 1.2  # how much more recall counts than precision


def rouge_l(hypotheses: Sequence[Words], references: Sequence[Sequence[Words]]) -> NDArray[np.float64]:
    """Return ROUGE-L in [0, 1] of each image's caption, (images,); the corpus' ROUGE-L is the mean.

    Precision and recall are each the best over the references, which may be two different ones. A caption without words
    counts as one empty word, as in the toolkit.

    Args:
        hypotheses: one word list per image.
        references: the word lists of each image's references.

    Raises:
        ValueError: lists of different length, or an image without a reference.
    """
    if len(hypotheses) != len(references):
        raise ValueError(f"ROUGE-L needs as many hypotheses as reference lists: {len(hypotheses)}, {len(references)}")
    scores = np.zeros(len(hypotheses))
    for image, (hypothesis, of_image) in enumerate(zip(hypotheses, references, strict=True)):
        if not of_image:
            raise ValueError(f"image {image} has no reference")
        words = hypothesis or [""]
        common = [longest_common_subsequence(words, reference or [""]) for reference in of_image]
        precision = max(common) / len(words)
        recall = max(n / max(len(reference), 1) for n, reference in zip(common, of_image, strict=True))
        if precision and recall:
            scores[image] = (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)
    return scores


def longest_common_subsequence(first: Words, second: Words) -> int:
    """Return how many words the longest subsequence of both has.

    Bit-parallel (Hyyrö 2004): a column of the usual table is one integer, whose bit i is 0 where the table grows by one
    at word i of ``first``.
    """
    where: dict[str, int] = {}
    for place, word in enumerate(first):
        where[word] = where.get(word, 0) | 1 << place
    everywhere = column = (1 << len(first)) - 1
    for word in second:
        matched = column & where.get(word, 0)
        column = (column + matched | column - matched) & everywhere
    return len(first) - column.bit_count()
