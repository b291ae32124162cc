"""How runs differ: scores on the same images with their uncertainty, curves, speed, size and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from captioning.comparison.conditions import add_conditions, add_training, ordered_curves, settings_table
from captioning.comparison.groups import group_by_seed
from captioning.comparison.measures import (
    Captions,
    Measure,
    caption_measures,
    common_images,
    grounding_measures,
    titles_of,
)
from captioning.comparison.result import Comparison, Disagreement, Group
from captioning.comparison.runs import Run
from captioning.comparison.score_tables import ScoreTables
from captioning.comparison.variants_table import add_variants
from captioning.comparison.verdicts import add_verdicts
from captioning.errors import InputError
from captioning.evaluation.metrics import TITLES


def compare(
    runs: Sequence[Run],
    *,
    metric: str = "bleu4",
    resamples: int = 1000,
    seed: int = 0,
    images: int = 12,
    java: bool = False,
) -> Comparison:
    """Compare runs with the first of them. Runs that differ in their seed alone are one variant, and stand together.

    Args:
        runs: Runs with different names.
        metric: One of ``evaluation.metrics.NAMES``, for the verdict and for the scores of single images.
        resamples: Resamples of the images, for every interval and every test.
        seed: Seed of the resampling.
        images: Number of disagreements to list.
        java: Whether to compute METEOR, where it is available and all runs use the English tokenizer.

    Raises:
        InputError: ``metric`` is not available.
    """
    named = {run.name: run for run in runs}
    variants = [group.runs for group in group_by_seed(runs)]
    runs = [named[name] for variant in variants for name in variant]
    result = Comparison([run.name for run in runs], metric, variants=variants)
    tested = {run.name: run.captions for run in runs if run.captions}
    result.notices += [_untested(run) for run in runs if not run.captions]
    common = common_images(tested, result)
    scored = {name: [captions[i] for i in common or sorted(captions)] for name, captions in tested.items()}
    java = java and not any(run.search.get("tokenizer") for run in runs)
    captions, nouns = caption_measures(scored, java=java), grounding_measures(scored)
    if captions and not any(metric in measure.keys for measure in captions):
        raise InputError(f"metric: {TITLES[metric]} cannot be computed here; it needs Java and English captions")
    groups = group_by_seed([run for run in runs if run.captions])
    compared = _compared_one_by_one(result.runs, groups) if common and result.runs[0] in tested else []
    tables = ScoreTables(result, compared, resamples=resamples, seed=seed)
    if captions:
        tables.add_captions(captions)
    if nouns:
        tables.add_grounding(nouns)
    measures = [measure for measure in [*captions, *nouns] if not measure.baseline]
    if any(len(group.runs) > 1 for group in groups):
        add_variants(result, measures, groups, named)
    add_verdicts(result, titles_of(measures))
    add_training(result, runs)
    add_conditions(result, runs)
    result.settings = settings_table(runs)
    result.curves = ordered_curves(runs, metric)
    if common and len(tested) > 1:
        (measure,) = [measure for measure in captions if metric in measure.keys]
        result.disagreements = _disagreements(tested, measure, common, metric)[:images]
    return result


def _compared_one_by_one(runs: Sequence[str], groups: Sequence[Group]) -> list[str]:
    """Return the runs that are compared with the first over images alone: unless both have several seeds."""
    seeds = {run: len(group.runs) for group in groups for run in group.runs}
    return [run for run in runs[1:] if run in seeds and min(seeds[run], seeds[runs[0]]) == 1]


def _untested(run: Run) -> str:
    missing = f"{run.name} has no captions of its test split"
    if run.checkpoint is None:
        return f"{missing}, and no checkpoint to make them with"
    return f"{missing}; to make them: captioning test --ckpt_path {run.checkpoint}"


def _disagreements(
    tested: Mapping[str, Captions], measure: Measure, common: Sequence[int], metric: str
) -> list[Disagreement]:
    """Return the images whose captions differ, those whose own scores differ most first."""
    assert measure.of_images is not None
    column = measure.keys.index(metric)
    scores = np.stack([measure.of_images(measure.counts[run])[:, column] for run in tested])  # (runs, images)
    spread = np.round(np.ptp(scores, axis=0), 9)
    found = []
    for i in np.argsort(-spread, kind="stable").tolist():
        said = {name: captions[common[i]].caption for name, captions in tested.items()}
        if len(set(said.values())) > 1:
            of_runs = dict(zip(tested, scores[:, i].tolist(), strict=True))
            references = next(iter(tested.values()))[common[i]].references
            found.append(Disagreement(common[i], said, of_runs, references))
    return found
