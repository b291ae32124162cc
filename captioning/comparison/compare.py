"""How runs differ: metrics on the same images with their uncertainty, curves, speed, size and settings."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from captioning.comparison.conditions import condition_tables, ordered_curves
from captioning.comparison.measures import CountedFamily, add_run_table, add_variants, caption_families, noun_families
from captioning.comparison.result import Comparison, Disagreement
from captioning.comparison.runs import Run
from captioning.comparison.variants import group_variants
from captioning.errors import InputError, check_choice
from captioning.evaluation.caption_files import CaptionedImage
from captioning.metrics.table import CAPTION_METRICS, FAMILIES, TITLES, few_images_warning

_CAPTIONS_NOTE = (
    "In percent; BLEU with brevity penalty, CIDEr-D times 100. Each metric has its 95 % interval (bootstrap over "
    "images){}; {} resamples{}."
)
_CHANGE_NOTE = (
    " and the difference from the first run with its 95 % interval (paired bootstrap) and p-value (randomization test)"
)
_GROUNDING_NOTE = (
    "In percent, over the nouns that name an object with a known mask. Pointing accuracy: the strongest location "
    "touches the object. Attention correctness: the fraction of attention on the object. Beneath each metric: "
    "its value for attention that ignores the caption."
)
ImagesById = Mapping[int, CaptionedImage]


def compare_runs(
    runs: Sequence[Run], *, metric: str = "bleu4", resamples: int = 1000, seed: int = 0, images: int = 12
) -> Comparison:
    """Compare runs with the first one; their names must differ. Runs that differ only in their seed are a variant.

    Raises InputError if the runs have no image in common, or the metric is METEOR without Java or English captions.

    Args:
        metric: The metric of the verdict and of single images, one of ``CAPTION_METRICS``.
        resamples: Resamples of the images, for every interval and every test.
        images: Number of disagreements to list.
    """
    check_choice(CAPTION_METRICS, metric=metric)
    variant_runs = [variant.runs for variant in group_variants(runs)]
    names = [name for variant in variant_runs for name in variant]
    runs = sorted(runs, key=lambda run: names.index(run.name))
    captions_by_run = {run.name: run.captions for run in runs if run.captions}
    common, image_notices = _common_images(captions_by_run)
    images_by_run = {name: [captions[i] for i in common] for name, captions in captions_by_run.items()}
    counted_captions = caption_families(images_by_run, meteor=not any(run.conditions.get("tokenizer") for run in runs))
    counted_nouns = noun_families(images_by_run)
    if counted_captions and not any(metric in family.metrics for family in counted_captions):
        raise InputError(f"metric: {TITLES[metric]} cannot be computed here; it needs Java and English captions")
    variants = group_variants([run for run in runs if run.captions])
    # If the variant of a run or of the first run has a single seed, the two runs are tested over images alone.
    seed_counts = {run: len(variant.runs) for variant in variants for run in variant.runs}
    tested_runs = [run for run in names[1:] if min(seed_counts.get(run, 0), seed_counts.get(names[0], 0)) == 1]
    note = _CAPTIONS_NOTE.format(_CHANGE_NOTE if tested_runs else "", resamples, few_images_warning(len(common)))
    comparison = Comparison(
        variant_runs,
        metric,
        notices=[*_run_notices(runs), *image_notices],
        curves=ordered_curves(runs, metric),
        disagreements=_disagreements(captions_by_run, counted_captions, common, metric)[:images] if common else [],
        image_count=len(common),
    )
    if max(seed_counts.values(), default=0) > 1:
        add_variants(comparison, variants, [*counted_captions, *counted_nouns], runs)
    for title, table_note, families in (
        (f"Captions of {len(common)} images", note, counted_captions),
        ("Grounding", _GROUNDING_NOTE, counted_nouns),
    ):
        if families:
            add_run_table(comparison, title, table_note, families, tested_runs, resamples=resamples, seed=seed)
    comparison.tables += condition_tables(runs, metric)
    return comparison


def _run_notices(runs: Sequence[Run]) -> Iterator[str]:
    """Yield sentences on runs without captions, with commands that test them, and on stochastic runs without draws."""
    for run in (run for run in runs if not run.captions):
        reason = "was tested with other weights than its checkpoint has now" if run.is_outdated else "has no captions"
        command = f"to test it: captioning test --ckpt_path {shlex.quote(str(run.checkpoint))}"
        yield f"{run.name} {reason}; {command if run.checkpoint else 'it has no checkpoint'}"
    sentence = "{} drew no location in training (its sample_probability stayed 0): it learned as soft attention does"
    yield from (sentence.format(run.name) for run in runs if run.never_drew)


def _shared_ids(first: ImagesById, second: ImagesById) -> set[int]:
    """Return the ids of images that both runs captioned. An id without a common reference names two images."""
    return {i for i in first if i in second and set(first[i].references) & set(second[i].references)}


def _common_images(captions_by_run: Mapping[str, ImagesById]) -> tuple[list[int], list[str]]:
    """Return the ids of the images that all of these runs captioned, and sentences on images that differ."""
    runs = list(captions_by_run.values())
    notices = []
    common = sorted(set.intersection(*(_shared_ids(runs[0], run) for run in runs))) if runs else []
    if any(len(run) != len(common) for run in runs):
        sizes = ", ".join(f"{name} {len(run)}" for name, run in captions_by_run.items())
        if not common:
            raise InputError(f"the tests of the runs have no image in common ({sizes}); compare runs on the same data")
        notices.append(
            f"The runs were tested on different images ({sizes}); they are compared on the {len(common)} in common."
        )
    changed_count = sum(any(set(run[i].references) != set(runs[0][i].references) for run in runs) for i in common)
    if changed_count:
        notices.append(f"The references of {changed_count} common images differ between the runs; test the runs again.")
    return common, notices


def _disagreements(
    captions_by_run: Mapping[str, ImagesById], families: Sequence[CountedFamily], common: Sequence[int], metric: str
) -> list[Disagreement]:
    """Return the common images whose captions differ, the largest difference in the metric first."""
    (counts,) = [family.counts for family in families if metric in family.metrics]
    (family,) = [family for family in FAMILIES if metric in family.metrics]
    column = list(family.metrics).index(metric)
    values = np.stack([family.image_statistic(counts[run])[:, column] for run in captions_by_run])  # (runs, images)
    disagreements = []
    for i in np.argsort(-np.round(np.ptp(values, axis=0), 9), kind="stable").tolist():
        images = {name: run[common[i]] for name, run in captions_by_run.items()}
        captions = {name: image.caption for name, image in images.items()}
        if len(set(captions.values())) > 1:
            run_values = dict(zip(captions_by_run, values[:, i].tolist(), strict=True))
            references = next(iter(images.values())).references
            file = next((Path(image.file).name for image in images.values() if image.file), "")
            disagreements.append(Disagreement(common[i], captions, run_values, references, file))
    return disagreements
