"""The table of all metrics, and the computation of caption metrics: BLEU-1..4, ROUGE-L, CIDEr-D and METEOR.

Every metric of captions is a function of counts that are summed over images, so ``resampling`` gives each one an
interval and a paired test in the same way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from captioning.errors import InputError, warn_once
from captioning.metrics.arrays import Floats, percentage
from captioning.metrics.bleu import bleu_counts, bleu_from_counts, bleu_metrics, sentence_bleu
from captioning.metrics.cider import CiderD
from captioning.metrics.meteor import meteor_counts, meteor_metric
from captioning.metrics.ngrams import ORDERS, Words
from captioning.metrics.rouge import rouge_l

UNIT = "percent; CIDEr-D is the COCO toolkit's number times 100"


class Metric(NamedTuple):
    """What logs, tables and comparisons know about a metric."""

    title: str
    unit: Literal["percent", "nats per word", "ratio"] = "percent"
    mode: Literal["max", "min"] | None = "max"  # whether the highest or the lowest value is best; None for neither
    hit_list: str = ""  # name of the list of ``NounHit`` in a ``CaptionedImage`` that is averaged over; "" for none
    hit_field: str = ""  # name of the field of ``NounHit`` that is averaged
    in_validation: bool = True  # False for a metric that is too slow for the validations of training
    needs_model: bool = False  # whether captions alone do not suffice; comparisons then read the run's test


_ALPHA_METRICS = {  # log keys are fixed, so they have the British "centre"
    "pointing_accuracy": Metric("Pointing accuracy", hit_field="hit"),
    "pointing_chance": Metric("Pointing, by chance", mode=None, hit_field="chance"),
    "pointing_centre": Metric("Pointing, always the center", mode=None, hit_field="center_hit"),
    "attention_correctness": Metric("Attention correctness", hit_field="correctness"),
    "correctness_uniform": Metric("Correctness, spread evenly", mode=None, hit_field="uniform_correctness"),
    "correctness_centre": Metric("Correctness, around the center", mode=None, hit_field="center_correctness"),
}
_EVIDENCE_METRICS = {
    "pointing_evidence": Metric("Pointing of the evidence", hit_field="hit"),
    "correctness_evidence": Metric("Correctness of the evidence", hit_field="correctness"),
}


def _noun_metrics(metrics: Mapping[str, Metric], hit_list: str) -> dict[str, Metric]:
    """Return metrics of the attention at the nouns of captions, and the same metrics at the nouns of references."""
    reference_metrics = {
        f"reference_{name}": metric._replace(title=f"{metric.title}, references", hit_list=f"reference_{hit_list}")
        for name, metric in metrics.items()
    }
    return {name: metric._replace(hit_list=hit_list) for name, metric in metrics.items()} | reference_metrics


ImageMeasure = Callable[[Sequence[Words], Sequence[Sequence[Words]]], Floats]
"""Maps hypotheses, one word list per image, and references, several per image, to an array with one row per image."""


@dataclass(frozen=True, eq=False)
class Family:
    """Metrics of captions that are functions of the same counts."""

    metrics: Mapping[str, Metric]  # by name
    count: ImageMeasure  # returns the counts (images, counts)
    statistic: Callable[[Floats], Floats]
    """Maps counts that are summed over images, (.., counts), to the corpus' metrics in ``UNIT``, (.., metrics)."""
    image_statistic: Callable[[Floats], Floats]
    """Maps (images, counts) to metrics of images, (images, metrics). Their mean is not the corpus' BLEU or METEOR."""


def _mean_over_images(name: str, title: str, measure: ImageMeasure) -> Family:
    """Return the family of a metric whose corpus value is the mean over images. Its counts are the value and 1."""

    def count(hypotheses: Sequence[Words], references: Sequence[Sequence[Words]]) -> Floats:
        values = measure(hypotheses, references)
        return np.stack([values, np.ones_like(values)], axis=1)

    return Family({name: Metric(title)}, count, percentage, percentage)


FAMILIES = (
    Family(
        {f"bleu{n}": Metric(f"BLEU-{n}") for n in range(1, ORDERS + 1)}, bleu_counts, bleu_from_counts, sentence_bleu
    ),
    _mean_over_images("rouge_l", "ROUGE-L", rouge_l),
    # The document frequencies stay those of all images when images are resampled.
    _mean_over_images("cider_d", "CIDEr-D", lambda captions, references: CiderD(references).values(captions)),
    Family({"meteor": Metric("METEOR", in_validation=False)}, meteor_counts, meteor_metric, meteor_metric),
)
"""The metrics of captions, which have intervals and tests."""

METRICS: dict[str, Metric] = {
    **{name: metric for family in FAMILIES for name, metric in family.metrics.items()},
    **{f"bleu{n}_no_penalty": Metric(f"BLEU-{n}, no brevity penalty", mode=None) for n in range(1, ORDERS + 1)},
    "brevity_penalty": Metric("Brevity penalty", "ratio", None),
    "length_ratio": Metric("Words per reference word", "ratio", None),
    "nll": Metric("NLL", "nats per word", "min", needs_model=True),
    "bound": Metric("Bound on log p", "nats per word", in_validation=False, needs_model=True),
    "iwae_bound": Metric("Importance-weighted bound on log p", "nats per word", in_validation=False, needs_model=True),
    **_noun_metrics(_ALPHA_METRICS, "hits"),
    **_noun_metrics(_EVIDENCE_METRICS, "evidence_hits"),
}
"""All metrics that an evaluation can have, for any data and attention, by their names in logs and files."""

CAPTION_METRICS = tuple(name for family in FAMILIES for name in family.metrics)
NOUN_METRICS = {name: metric for name, metric in METRICS.items() if metric.hit_list}
TITLES = {name: metric.title for name, metric in METRICS.items()}


def log_key(stage: str, name: str) -> str:
    """Return the key of a metric in loggers, such as "val/bleu4", or "val_controls/pointing_chance"."""
    return f"{stage}{'_controls' if METRICS[name].mode is None else ''}/{name}"


def few_images_warning(image_count: int) -> str:
    """Return a warning to print after a metric of fewer than 100 images, "" for more images."""
    return "; BLEU of fewer than 100 images says little" if 0 < image_count < 100 else ""


def family_counts(
    hypotheses: Sequence[Words], references: Sequence[Sequence[Words]], *, meteor: bool = True
) -> Iterator[tuple[Family, Floats]]:
    """Yield each family of metrics that is available here with its counts (images, counts).

    METEOR, which takes 4 s and more, is computed if ``meteor`` is true; a warning says once why it is not available.
    Raises ValueError if the lists differ in length, or an image has no reference.
    """
    if len(references) == 1:
        warn_once("CIDEr-D of one image is 0: there are no document frequencies; evaluate several images together")
    for family in FAMILIES:
        if meteor or "meteor" not in family.metrics:
            try:
                yield family, family.count(hypotheses, references)
            except InputError as error:
                warn_once(str(error))


def caption_metrics(
    hypotheses: Sequence[Words], references: Sequence[Sequence[Words]], *, meteor: bool = True
) -> dict[str, float]:
    """Return the corpus' metrics in ``UNIT``, and all of ``bleu_metrics``; arguments are as in ``family_counts``."""
    metrics: dict[str, float] = {}
    for family, counts in family_counts(hypotheses, references, meteor=meteor):
        sums = counts.sum(axis=0)
        values = dict(zip(family.metrics, family.statistic(sums).tolist(), strict=True))
        metrics |= bleu_metrics(sums) if "bleu4" in values else values
    return metrics
