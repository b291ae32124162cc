"""How runs differ: scores on the same images with their uncertainty, curves, speed, size and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from captioning.comparison.conditions import add_conditions
from captioning.comparison.groups import group_by_seed
from captioning.comparison.measures import Captions, Measure, caption_measures, grounding_measures
from captioning.comparison.result import CORRECTED, Cell, Comparison, Disagreement, Row, Table
from captioning.comparison.runs import Run
from captioning.comparison.variants_table import add_variants
from captioning.comparison.verdicts import ONE_SEED, add_verdicts
from captioning.errors import InputError, check_choice
from captioning.metrics.bleu import bleu_metrics
from captioning.metrics.resampling import LEVEL, Difference, Interval, differences, holm, intervals
from captioning.metrics.table import TITLES, few_images_warning
from captioning.progress import Progress

_GROUNDING = (
    "Over the nouns that name an object with a known mask, percent. Pointing accuracy: the strongest location "
    "touches the object; attention correctness: the fraction of attention on it. Beneath each: what attention "
    "that ignores the caption gets at the same nouns."
)


def compare(
    runs: Sequence[Run], *, metric: str = "bleu4", resamples: int = 1000, seed: int = 0, images: int = 12
) -> Comparison:
    """Compare runs with the first one; their names must differ. Runs that differ only in their seed are a variant.

    Runs that were tested on other images than most are left out, with a notice. METEOR needs Java and English captions.

    Args:
        metric: The metric of the verdict and of the scores of single images, one of ``metrics.table.FAMILIES``.
        resamples: Resamples of the images, for every interval and every test.
        images: Number of disagreements to list.
    """
    check_choice(TITLES, metric=metric)
    runs, aside = _on_the_same_data(runs)
    named = {run.name: run for run in runs}
    variants = [group.runs for group in group_by_seed(runs)]
    runs = [named[name] for variant in variants for name in variant]
    result = Comparison([run.name for run in runs], metric, variants)
    tested = {run.name: run.captions for run in runs if run.captions}
    result.notices += [*aside, *(_untested(run) for run in runs if not run.captions)]
    result.notices += [
        f"{run.name} drew no location in training (its sample_probability stayed 0): it learned as soft attention does"
        for run in runs
        if run.never_drew
    ]
    common = _common_images(tested, result) if tested else []
    scored = {name: [captions[i] for i in common or sorted(captions)] for name, captions in tested.items()}
    captions = caption_measures(scored, java=not any(run.search.get("tokenizer") for run in runs))
    nouns = grounding_measures(scored)
    if captions and not any(metric in measure.keys for measure in captions):
        raise InputError(f"metric: {TITLES[metric]} cannot be computed here; it needs Java and English captions")
    groups = group_by_seed([run for run in runs if run.captions])
    # A run is compared with the first over images only if one of the two has a single seed.
    seeds = {run: len(group.runs) for group in groups for run in group.runs}
    first, *others = result.runs
    compared = [run for run in others if common and min(seeds.get(run, 0), seeds.get(first, 0)) == 1]
    if captions:
        on = f"{result.images} images" if result.images else "each run's own images"
        change = (
            " and the difference from the first run with its 95 % interval (paired bootstrap) "
            "and p-value (randomization test)"
        )
        note = (
            "Percent; BLEU with brevity penalty, CIDEr-D times 100. Below each score its 95 % interval (bootstrap over "
            f"images){change * bool(compared)}, {resamples} resamples{few_images_warning(result.images)}."
        )
        _add_scores(result, Table(f"Captions of {on}", [], note), captions, compared, resamples=resamples, seed=seed)
        bleu = captions[0].counts
        totals = [bleu_metrics(bleu[run].sum(axis=0)) if run in bleu else {} for run in result.runs]
        cells = [Cell.plain(total.get("length_ratio"), "{:.3f}") for total in totals]
        result.tables[-1].rows.append(Row(TITLES["length_ratio"], cells))
    if nouns:
        _add_scores(result, Table("Grounding", [], _GROUNDING), nouns, compared, resamples=resamples, seed=seed)
    if any(len(group.runs) > 1 for group in groups):
        add_variants(result, [measure for measure in [*captions, *nouns] if not measure.baseline], groups, named)
    add_verdicts(result)
    add_conditions(result, runs)
    if common and len(tested) > 1:
        (measure,) = [measure for measure in captions if metric in measure.keys]
        result.disagreements = _disagreements(tested, measure, common, metric)[:images]
    return result


def _untested(run: Run) -> str:
    if run.checkpoint is None:
        return f"{run.name} has no captions of its test split, and no checkpoint to make them with"
    why, what = "has no captions of its test split", "make them"
    if run.outdated:
        why, what = f"was tested with other weights than its {run.checkpoint.name} has now", "test it again"
    return f"{run.name} {why}; to {what}: captioning test --ckpt_path {run.checkpoint}"


def _on_the_same_data(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs that share images with most runs, and a sentence on each other run.

    Two runs on different data are both kept.
    """
    tested = {run.name: run.captions for run in runs if run.captions}
    shared = {name: [other for other in tested if _shared(tested[name], tested[other])] for name in tested}
    kept = max(shared.values(), key=len, default=[])
    if len(kept) < 2:
        return list(runs), []
    aside = [name for name in shared if name not in kept]
    sentence = "{} was tested on other data than {}, and is left out of this comparison."
    return [run for run in runs if run.name not in aside], [sentence.format(name, kept[0]) for name in aside]


def _shared(first: Captions, second: Captions) -> set[int]:
    """Return the ids of the images that both runs captioned; an image of another data set has other references."""
    return {i for i in first if i in second and set(first[i].references) & set(second[i].references)}


def _common_images(tested: Mapping[str, Captions], result: Comparison) -> list[int]:
    """Return the ids of the images that all tested runs captioned; add a notice if some runs have further images."""
    first = next(iter(tested.values()))
    common = sorted(set.intersection(*(_shared(first, run) for run in tested.values())))
    if any(len(run) != len(common) for run in tested.values()):
        sizes = ", ".join(f"{name} {len(run)}" for name, run in tested.items())
        result.notices.append(
            f"The runs were evaluated on different images ({sizes}); compared on the {len(common)} in common."
            if common
            else f"The runs have no image in common ({sizes}): each is scored on its own images, and no test is made."
        )
    if differ := sum(
        any(set(run[i].references) != set(first[i].references) for run in tested.values()) for i in common
    ):
        result.notices.append(f"The references of {differ} common images differ between the runs; test them again.")
    result.images = len(common)
    return common


def _add_scores(
    result: Comparison, table: Table, measures: Sequence[Measure], compared: Sequence[str], *, resamples: int, seed: int
) -> None:
    """Add a table of measures with intervals, and tests that are corrected for their number."""
    first = result.runs[0]
    tests: dict[tuple[str, str], Difference] = {}
    for measure in Progress(f"{table.title}: intervals", over=measures, unit=" metrics"):
        for run, counts in () if measure.baseline else measure.counts.items():
            ends = intervals(counts, measure.values, resamples=resamples, seed=seed).reshape(3, -1)
            scores = {key: Interval(*of_key) for key, of_key in zip(measure.keys, ends.T.tolist(), strict=True)}
            result.scores.setdefault(run, {}).update(scores)
            if run in compared and first in measure.counts:
                tested = differences(measure.counts[first], counts, measure.values, resamples=resamples, seed=seed)
                tests |= {(run, key): test for key, test in zip(measure.keys, tested, strict=True)}
    for (run, key), corrected in zip(tests, holm(list(tests.values())), strict=True):
        result.tests.setdefault(run, {})[key] = corrected
    if len(tests) / (resamples + 1) >= LEVEL:
        result.notices.append(
            f"{resamples} resamples are too few for {len(tests)} tests: no corrected p-value can be below "
            f"{LEVEL}; take at least {round(len(tests) / LEVEL)}."
        )
    for measure in measures:
        for key in measure.keys:
            cells = [_cell(result, measure, key, run) for run in result.runs]
            table.rows.append(Row(TITLES[key], cells, measure.baseline))
    note = f"{table.note}{CORRECTED} The tests are over images; {ONE_SEED}." if tests else table.note
    result.tables.append(table._replace(note=note))


def _cell(result: Comparison, measure: Measure, key: str, run: str) -> Cell:
    counts = measure.counts.get(run)
    if counts is None:
        return Cell()
    if measure.baseline:
        return Cell.plain(float(measure.values(counts.sum(axis=0))), "{:.1f}")
    score, of = result.scores[run][key], f", {int(counts[:, 1].sum())} {measure.unit}" if measure.unit else ""
    return Cell.measured(score.value, f"{score.low:.1f} to {score.high:.1f}{of}", result.tests.get(run, {}).get(key))


def _disagreements(
    tested: Mapping[str, Captions], measure: Measure, common: Sequence[int], metric: str
) -> list[Disagreement]:
    """Return the images whose captions differ, the largest difference of scores first."""
    assert measure.of_images is not None
    column = measure.keys.index(metric)
    scores = np.stack([measure.of_images(measure.counts[run])[:, column] for run in tested])  # (runs, images)
    spread = np.round(np.ptp(scores, axis=0), 9)
    found = []
    for i in np.argsort(-spread, kind="stable").tolist():
        captions = {name: run[common[i]].caption for name, run in tested.items()}
        if len(set(captions.values())) > 1:
            references = next(iter(tested.values()))[common[i]].references
            run_scores = dict(zip(tested, scores[:, i].tolist(), strict=True))
            found.append(Disagreement(common[i], captions, run_scores, references))
    return found
