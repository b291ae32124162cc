"""The scores of captions, in one table: BLEU-1..4, ROUGE-L, CIDEr-D, METEOR and SPICE, from words to numbers.

All of them are functions of counts that are summed over images, so that ``resampling`` gives every score an interval
and a paired test in the same way.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from captioning.evaluation.bleu import ORDERS, Words, bleu_counts, bleu_from_counts, corpus_bleu, sentence_bleu
from captioning.evaluation.cider import cider_d
from captioning.evaluation.java import (
    JavaError,
    meteor_counts,
    meteor_from_counts,
    missing_meteor,
    missing_spice,
    spice,
)
from captioning.evaluation.resampling import Floats, percentage
from captioning.evaluation.rouge import rouge_l

logger = logging.getLogger(__name__)

UNIT = "percent; CIDEr-D is the COCO toolkit's number times 100"


@dataclass(frozen=True)
class Family:
    """Scores that are functions of the same counts.

    Attributes:
        names: of the S scores, the keys in logs and files.
        titles: as people write them.
        counts: from hypotheses (a word list per image) and references (word lists per image) to (images, C).
        scores: from counts that are summed over images, (..., C), to the corpus' scores in ``UNIT``, (..., S).
        of_images: from (images, C) to the scores of single images, (images, S); smoothed for BLEU, whose mean is not
            the corpus' score. Nor is METEOR's.
        missing: of a family that needs Java: why it cannot be computed on this machine, in one line, or None.
    """

    names: tuple[str, ...]
    titles: tuple[str, ...]
    counts: Callable[[Sequence[Words], Sequence[Sequence[Words]]], Floats]
    scores: Callable[[Floats], Floats]
    of_images: Callable[[Floats], Floats]
    missing: Callable[[], str | None] | None = None


def _mean_of(score: Callable[[Sequence[Words], Sequence[Sequence[Words]]], Floats]) -> Callable[..., Floats]:
    """Make counts (images, 2), each image's score and 1, of a score whose corpus value is its mean."""

    @functools.wraps(score)
    def counts(hypotheses: Sequence[Words], references: Sequence[Sequence[Words]]) -> Floats:
        scores = score(hypotheses, references)
        return np.stack([scores, np.ones_like(scores)], axis=1)

    return counts


def _mean(counts: ArrayLike) -> Floats:
    return percentage(np.asarray(counts, dtype=np.float64))[..., None]


def _meteor(counts: ArrayLike) -> Floats:
    return 100 * meteor_from_counts(np.asarray(counts))[..., None]


def _sentence_bleus(counts: ArrayLike) -> Floats:
    return np.stack([sentence_bleu(counts, n) for n in range(1, ORDERS + 1)], axis=-1)


FAMILIES = (
    Family(
        tuple(f"bleu{n}" for n in range(1, ORDERS + 1)),
        tuple(f"BLEU-{n}" for n in range(1, ORDERS + 1)),
        lambda hypotheses, references: bleu_counts(hypotheses, references).astype(np.float64),
        bleu_from_counts,
        _sentence_bleus,
    ),
    Family(("rouge_l",), ("ROUGE-L",), _mean_of(rouge_l), _mean, _mean),
    # The document frequencies are those of all references that are given: resampling does not draw them anew.
    Family(("cider_d",), ("CIDEr-D",), _mean_of(cider_d), _mean, _mean),
    Family(("meteor",), ("METEOR",), meteor_counts, _meteor, _meteor, missing_meteor),
    Family(("spice",), ("SPICE",), _mean_of(spice), _mean, _mean, missing_spice),
)
NAMES = tuple(name for family in FAMILIES for name in family.names)
TITLES = {name: title for family in FAMILIES for name, title in zip(family.names, family.titles, strict=True)}


def count(
    hypotheses: Sequence[Words], references: Sequence[Sequence[Words]], *, java: bool = True
) -> list[tuple[Family, Floats]]:
    """Return each family of scores that can be computed here with its counts (images, C).

    What cannot is said in one line of the log, once.

    Args:
        hypotheses: one word list per image.
        references: the word lists of each image's references.
        java: whether to compute METEOR and SPICE where they are available; METEOR takes 4 s and more.

    Raises:
        ValueError: lists of different length, none at all, or an image without a reference.
    """
    return _count(FAMILIES, hypotheses, references, java=java)


def score_captions(
    hypotheses: Sequence[Words], references: Sequence[Sequence[Words]], *, java: bool = True
) -> dict[str, float]:
    """Return the corpus' scores in ``UNIT``.

    Args:
        hypotheses, references, java: as of ``count``.

    Returns:
        What ``corpus_bleu`` returns, ``rouge_l`` and ``cider_d``; ``meteor`` and ``spice`` where they are available.

    Raises:
        ValueError: lists of different length, none at all, or an image without a reference.
    """
    scores = corpus_bleu(hypotheses, references)
    for family, counts in _count(FAMILIES[1:], hypotheses, references, java=java):  # BLEU is counted already
        values = family.scores(counts.sum(axis=0))
        scores |= {name: float(value) for name, value in zip(family.names, values, strict=True)}
    return scores


def _count(
    families: Sequence[Family], hypotheses: Sequence[Words], references: Sequence[Sequence[Words]], *, java: bool
) -> list[tuple[Family, Floats]]:
    found = []
    for family in families:
        if family.missing is not None and not java:
            continue
        try:
            found.append((family, family.counts(hypotheses, references)))
        except JavaError as error:
            _say(f"no {family.titles[0]}: {error}")
    return found


@functools.cache
def _say(line: str) -> None:
    logger.warning(line)
