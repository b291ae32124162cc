"""Caption metrics. Strings in, numbers out, so that no special token can leak into a score.

Every score is over word lists as ``vocabulary.tokenize`` makes them (Penn Treebank rules, lower case, no punctuation),
or over a data set's own tokens where it brings them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Words = Sequence[str]


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
    from nltk.translate.bleu_score import brevity_penalty, closest_ref_length, modified_precision

    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(f"BLEU needs as many hypotheses as reference lists, got {len(hypotheses)}, {len(references)}")
    matches, possible = [0] * 4, [0] * 4
    hypothesis_length = reference_length = 0
    for image, (hypothesis, image_references) in enumerate(zip(hypotheses, references, strict=True)):
        if not image_references:
            raise ValueError(f"image {image} has no reference")
        hypothesis_length += len(hypothesis)
        reference_length += closest_ref_length(image_references, len(hypothesis))
        for n in range(1, 5):
            if len(hypothesis) >= n:
                precision = modified_precision(image_references, hypothesis, n)
                matches[n - 1] += precision.numerator
                possible[n - 1] += precision.denominator
    penalty = brevity_penalty(reference_length, hypothesis_length)
    scores: dict[str, float] = {}
    log_sum = 0.0
    for n, (matched, total) in enumerate(zip(matches, possible, strict=True), start=1):
        log_sum += math.log(matched / total) if matched else -math.inf
        geometric_mean = 100 * math.exp(log_sum / n)
        scores[f"bleu{n}"] = penalty * geometric_mean
        scores[f"bleu{n}_no_penalty"] = geometric_mean
    scores["brevity_penalty"] = penalty
    scores["length_ratio"] = hypothesis_length / reference_length if reference_length else 0.0
    return scores
