"""The table of all metrics, and those of captions: BLEU-1..4, ROUGE-L, CIDEr-D and METEOR.

Every metric of captions is a function of counts that are summed over images, so ``resampling`` gives each one an
interval and a paired test in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from captioning.errors import warn_once
from captioning.metrics.bleu import ORDERS, Words, bleu_counts, bleu_from_counts, bleu_metrics, sentence_bleu
from captioning.metrics.cider import CiderD
from captioning.metrics.meteor import JavaError, meteor_counts, meteor_from_counts
from captioning.metrics.resampling import Floats, percentage

ROUGE_BETA = 1.2
UNIT = "percent; CIDEr-D is the COCO toolkit's number times 100"


class Metric(NamedTuple):
    """Title, unit and direction of a metric."""

    title: str
    unit: Literal["percent", "nats per word", "ratio"] = "percent"
    better: Literal["max", "min"] | None = "max"  # the highest or the lowest value is the best; None for a control
    field: str = ""  # of a ``NounHit``, if the metric is a mean over nouns


NOUN_METRICS = {
    "pointing_accuracy": Metric("Pointing accuracy", field="hit"),
    "pointing_chance": Metric("Pointing, by chance", better=None, field="chance"),
    "pointing_centre": Metric("Pointing, always the centre", better=None, field="centre_hit"),
    "attention_correctness": Metric("Attention correctness", field="correctness"),
    "correctness_uniform": Metric("Correctness, spread evenly", better=None, field="uniform"),
    "correctness_centre": Metric("Correctness, around the centre", better=None, field="centre"),
}
EVIDENCE_METRICS = {"pointing_accuracy": "pointing_evidence", "attention_correctness": "correctness_evidence"}
"""The metric of the alphas -> the same metric of the evidence."""
METRICS: dict[str, Metric] = {
    **{f"bleu{n}": Metric(f"BLEU-{n}") for n in range(1, ORDERS + 1)},
    "rouge_l": Metric("ROUGE-L"),
    "cider_d": Metric("CIDEr-D"),
    "meteor": Metric("METEOR"),
    **{f"bleu{n}_no_penalty": Metric(f"BLEU-{n}, no brevity penalty", better=None) for n in range(1, ORDERS + 1)},
    "brevity_penalty": Metric("Brevity penalty", "ratio", None),
    "length_ratio": Metric("Words per reference word", "ratio", None),
    "nll": Metric("NLL", "nats per word", "min"),
    "bound": Metric("Bound on log p", "nats per word"),
    "iwae_bound": Metric("Importance-weighted bound on log p", "nats per word"),
    **NOUN_METRICS,
    **{f"reference_{name}": m._replace(title=f"{m.title}, references") for name, m in NOUN_METRICS.items()},
    "pointing_evidence": Metric("Pointing of the evidence"),
    "correctness_evidence": Metric("Correctness of the evidence"),
    "reference_pointing_evidence": Metric("Pointing of the evidence, references"),
    "reference_correctness_evidence": Metric("Correctness of the evidence, references"),
}
"""All metrics that an evaluation can have, for any data and attention, by their names in logs and files."""


def better(key: str) -> Literal["max", "min"] | None:
    """Return ``Metric.better`` of a log key such as "val/nll"; None if it is no metric."""
    metric = METRICS.get(key.partition("/")[2])
    return metric and metric.better


def few_images_warning(images: int) -> str:
    """Return a warning to print after a metric of fewer than 100 images, "" for more images."""
    return "; BLEU of fewer than 100 images says little" * (0 < images < 100)


TITLES = {name: metric.title for name, metric in METRICS.items()}


def log_key(stage: str, name: str) -> str:
    """Return the key of a metric in loggers, such as "val/bleu4", or "val_controls/pointing_chance"."""
    return f"{stage}{'_controls' * (METRICS[name].better is None)}/{name}"


def rouge_l(hypotheses: Sequence[Words], references: Sequence[Sequence[Words]]) -> Floats:
    """Return ROUGE-L (Lin 2004) in [0, 1] of each image's caption, (images,); the corpus' ROUGE-L is the mean.

    As in the COCO toolkit, precision and recall are each the best over the references, recall weighs ``ROUGE_BETA``
    times as much, and a caption without words counts as one empty word.
    """
    values = np.zeros(len(hypotheses))
    for image, (hypothesis, image_references) in enumerate(zip(hypotheses, references, strict=True)):
        words = hypothesis or [""]
        common = [longest_common_subsequence(words, reference or [""]) for reference in image_references]
        precision = max(common) / len(words)
        recall = max(n / max(len(reference), 1) for n, reference in zip(common, image_references, strict=True))
        if precision and recall:
            values[image] = (1 + ROUGE_BETA**2) * precision * recall / (recall + ROUGE_BETA**2 * precision)
    return values


def longest_common_subsequence(first: Words, second: Words) -> int:
    """Return the number of words in the longest common subsequence.

    Bit-parallel (Hyyrö 2004): a column of the usual table is one integer. Its bit i is 0 where the table grows by one
    at word i of ``first``.
    """
    positions: dict[str, int] = {}
    for position, word in enumerate(first):
        positions[word] = positions.get(word, 0) | 1 << position
    everywhere = column = (1 << len(first)) - 1
    for word in second:
        matched = column & positions.get(word, 0)
        column = (column + matched | column - matched) & everywhere
    return len(first) - column.bit_count()


@dataclass(frozen=True)
class Family:
    """S metrics of captions that are functions of the same counts."""

    names: tuple[str, ...]  # in logs and files, keys of ``METRICS``
    counts: Callable[[Sequence[Words], Sequence[Sequence[Words]]], Floats]
    """Maps hypotheses, a word list per image, and references, word lists per image, to counts (images, C)."""
    values: Callable[[Floats], Floats]
    """Maps counts that are summed over images, (..., C), to the corpus' metrics in ``UNIT``, (..., S)."""
    image_values: Callable[[Floats], Floats]
    """Maps (images, C) to metrics of images, (images, S). The mean of BLEU or METEOR is not the corpus' value."""
    java: bool = False

    @property
    def titles(self) -> list[str]:
        return [TITLES[name] for name in self.names]


def _with_trials(values: Floats) -> Floats:
    """Return counts (images, 2), the value and 1, of a metric whose corpus value is the mean over images."""
    return np.stack([values, np.ones_like(values)], axis=1)


def _mean(counts: Floats) -> Floats:
    return percentage(counts)[..., None]


def _meteor(counts: Floats) -> Floats:
    return 100 * meteor_from_counts(counts)[..., None]


FAMILIES = (
    Family(tuple(f"bleu{n}" for n in range(1, ORDERS + 1)), bleu_counts, bleu_from_counts, sentence_bleu),
    Family(("rouge_l",), lambda captions, references: _with_trials(rouge_l(captions, references)), _mean, _mean),
    # Resampling does not count the document frequencies again.
    Family(("cider_d",), lambda captions, references: _with_trials(CiderD(references).values(captions)), _mean, _mean),
    Family(("meteor",), meteor_counts, _meteor, _meteor, java=True),
)
"""The metrics of captions, which have intervals and tests."""


def count(
    hypotheses: Sequence[Words], references: Sequence[Sequence[Words]], *, java: bool = True
) -> Iterator[tuple[Family, Floats]]:
    """Yield each family of metrics that is available here with its counts (images, C).

    Args:
        java: Compute METEOR, which takes 4 s and more. A warning says once why it is not available.

    Raises:
        ValueError: The lists differ in length, or an image has no reference.
    """
    if len(references) == 1:
        warn_once("CIDEr-D of one image is 0: there are no document frequencies; evaluate several images together")
    for family in FAMILIES:
        if java or not family.java:
            try:
                yield family, family.counts(hypotheses, references)
            except JavaError as error:
                warn_once(f"no {family.titles[0]}: {error}")


def caption_metrics(
    hypotheses: Sequence[Words], references: Sequence[Sequence[Words]], *, java: bool = True
) -> dict[str, float]:
    """Return the corpus' metrics in ``UNIT``, and all of ``bleu_metrics``; the arguments are as in ``count``."""
    metrics: dict[str, float] = {}
    for family, counts in count(hypotheses, references, java=java):
        total = counts.sum(axis=0)
        values = dict(zip(family.names, family.values(total).tolist(), strict=True))
        metrics |= bleu_metrics(total) if "bleu4" in values else values
    return metrics
