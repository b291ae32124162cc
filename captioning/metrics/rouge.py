"""ROUGE-L (Lin 2004): the longest common subsequence of a caption and its references."""

from collections.abc import Sequence

import numpy as np

from captioning.metrics.arrays import Floats
from captioning.metrics.ngrams import Words

BETA = 1.2  # weight of recall relative to precision, as in the COCO toolkit


def rouge_l(hypotheses: Sequence[Words], references: Sequence[Sequence[Words]]) -> Floats:
    """Return ROUGE-L in [0, 1] of each image's caption, (images,); the corpus' ROUGE-L is the mean.

    As in the COCO toolkit, precision and recall are each the best over the references, and a caption without words is
    one empty word.
    """
    values = np.zeros(len(hypotheses))
    for image, (hypothesis, image_references) in enumerate(zip(hypotheses, references, strict=True)):
        words = hypothesis or [""]
        lengths = [lcs_length(words, reference or [""]) for reference in image_references]
        precision = max(lengths) / len(words)
        recall = max(n / max(len(reference), 1) for n, reference in zip(lengths, image_references, strict=True))
        if precision and recall:
            values[image] = (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)
    return values


def lcs_length(first: Words, second: Words) -> int:
    """Return the number of words in the longest common subsequence.

    The algorithm is bit-parallel (Hyyrö 2004). One integer holds a column of the dynamic-programming table: bit i is 0
    if the length grows by one at word i of ``first``.
    """
    bits_of_word: dict[str, int] = {}  # the positions of each word
    for position, word in enumerate(first):
        bits_of_word[word] = bits_of_word.get(word, 0) | 1 << position
    all_bits = column = (1 << len(first)) - 1
    for word in second:
        matches = column & bits_of_word.get(word, 0)
        column = (column + matches | column - matches) & all_bits
    return len(first) - column.bit_count()
