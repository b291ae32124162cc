"""The table of all scores of captions: BLEU-1..4, ROUGE-L, CIDEr-D, METEOR and SPICE.

Every score is a function of counts that are summed over images, so ``resampling`` gives each an interval and a paired
test in the same way.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from captioning.evaluation.bleu import bleu_counts, bleu_from_counts, corpus_bleu, sentence_bleu
from captioning.evaluation.cider import cider_d
from captioning.evaluation.java import (
    JavaError,
    meteor_counts,
    meteor_from_counts,
    missing_meteor,
    missing_spice,
    spice,
)
from captioning.evaluation.ngrams import ORDERS, Words
from captioning.evaluation.resampling import Floats, percentage
from captioning.evaluation.rouge import rouge_l

logger = logging.getLogger(__name__)

UNIT = "percent; CIDEr-D is the COCO toolkit's number times 100"


@dataclass(frozen=True)
class Family:
    """S scores that are functions of the same counts.

    Attributes:
        names: Keys of the scores in logs and files.
        titles: Their names in print.
        counts: Maps hypotheses (a word list per image) and references (word lists per image) to counts (images, C).
        scores: Maps counts that are summed over images, (..., C), to the corpus' scores in ``UNIT``, (..., S).
        of_images: Maps (images, C) to the scores of single images, (images, S). BLEU is smoothed; the means of BLEU and
            METEOR are not the corpus' scores.
        missing: Returns why a family that needs Java cannot be computed here, in one line, or None.
    """

    names: tuple[str, ...]
    titles: tuple[str, ...]
    counts: Callable[[Sequence[Words], Sequence[Sequence[Words]]], Floats]
    scores: Callable[[Floats], Floats]
    of_images: Callable[[Floats], Floats]
    missing: Callable[[], str | None] | None = None


def _mean_of(score: Callable[[Sequence[Words], Sequence[Sequence[Words]]], Floats]) -> Callable[..., Floats]:
    """Return counts (images, 2), the image's score and 1, for a score whose corpus value is the mean over images."""

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
    # Document frequencies are those of all given references: resampling does not count them again.
    Family(("cider_d",), ("CIDEr-D",), _mean_of(cider_d), _mean, _mean),
    Family(("meteor",), ("METEOR",), meteor_counts, _meteor, _meteor, missing_meteor),
    Family(("spice",), ("SPICE",), _mean_of(spice), _mean, _mean, missing_spice),
)
NAMES = tuple(name for family in FAMILIES for name in family.names)
TITLES = {name: title for family in FAMILIES for name, title in zip(family.names, family.titles, strict=True)}


def count(
    hypotheses: Sequence[Words], references: Sequence[Sequence[Words]], *, java: bool = True
) -> list[tuple[Family, Floats]]:
    """Return each family of scores that is available here with its counts (images, C).

    For a family that is not available, one line is logged once.

    Args:
        hypotheses: One word list per image.
        references: The word lists of each image's references.
        java: Compute METEOR and SPICE where they are available; METEOR takes 4 s and more.

    Raises:
        ValueError: The lists differ in length or are empty, or an image has no reference.
    """
    return _count(FAMILIES, hypotheses, references, java=java)


def score_captions(
    hypotheses: Sequence[Words], references: Sequence[Sequence[Words]], *, java: bool = True
) -> dict[str, float]:
    """Return the corpus' scores in ``UNIT``.

    Args:
        hypotheses, references, java: As for ``count``.

    Returns:
        The scores of ``corpus_bleu``, ``rouge_l`` and ``cider_d``; ``meteor`` and ``spice`` where they are available.

    Raises:
        ValueError: The lists differ in length or are empty, or an image has no reference.
    """
    scores = corpus_bleu(hypotheses, references)
    for family, counts in _count(FAMILIES[1:], hypotheses, references, java=java):  # corpus_bleu has counted BLEU
        values = family.scores(counts.sum(axis=0))
        scores |= {name: float(value) for name, value in zip(family.names, values, strict=True)}
    return scores


def _count(
    families: Sequence[Family], hypotheses: Sequence[Words], references: Sequence[Sequence[Words]], *, java: bool
) -> list[tuple[Family, Floats]]:
    counts = []
    for family in families:
        if family.missing is not None and not java:
            continue
        try:
            counts.append((family, family.counts(hypotheses, references)))
        except JavaError as error:
            _warn_once(f"no {family.titles[0]}: {error}")
    return counts


@functools.cache
def _warn_once(line: str) -> None:
    logger.warning(line)
