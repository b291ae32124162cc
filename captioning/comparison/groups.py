"""Variants: runs that differ in their seed alone, with mean and deviation, compared over seeds and images."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from captioning.comparison.captions import finding
from captioning.comparison.conditions import settings_of
from captioning.comparison.formats import key_of, p_text, range_text
from captioning.comparison.grounding import CAPTIONS, GROUNDING, noun_counts
from captioning.comparison.result import Cell, Comparison, Group, Row, Table
from captioning.comparison.runs import Run
from captioning.comparison.scored import CORRECTED, Scored
from captioning.evaluation.resampling import Difference, Floats, Score, holm, share
from captioning.evaluation.scores import TITLES, Family
from captioning.evaluation.seeds import LEAST_PAIRS, seed_differences
from captioning.run_folder import of_any_seed

_SEEDS = ("seed_everything", "data.seed")
_BEGIN = "init_from"
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
_ON = {"model.decoder.output.rest": True}  # options that earlier versions lack and that are not off by default
_SEPARATORS = "_-. /"
_OWN_SCORES = {"nll": "NLL, nats per word", "bound": "Bound L_s, nats per word", "iwae_bound": "IWAE bound"}


def group_by_seed(runs: Sequence[Run]) -> list[Group]:
    """Return the variants in the order of the runs; a run alone, or without known settings, is a group of its own.

    Two runs of one seed are never in one group: they would count the same twice.
    """
    variants: list[tuple[dict[str, Any], dict[str, Run]]] = []  # settings, and the runs by seed
    for run in runs:
        settings = settings_of(run)
        seed = next((str(settings[key]) for key in _SEEDS if settings.get(key) is not None), "")
        kept = {key: value for key, value in settings.items() if key not in _SEEDS and not _is_beginning(key)}
        for others, found in variants:
            other = next(iter(found.values()))
            known = run.settings and other.settings and seed
            alike = _searched_alike(run, other) and _begun_alike(run, other) and _agree(kept, others)
            if known and seed not in found and alike:
                found[seed] = run
                break
        else:
            variants.append((kept, {seed: run}))
    taken = {run.name for run in runs}
    groups = []
    for _, found in variants:
        names = [run.name for run in found.values()]
        name = names[0] if len(names) == 1 else _common_name(names, list(found))
        while len(names) > 1 and name in taken:
            name += " (seeds)"
        taken.add(name)
        groups.append(Group(name, names, list(found)))
    return groups


def _searched_alike(run: Run, other: Run) -> bool:
    unsaid = {"split", "checkpoint"} - (run.search.keys() & other.search.keys())  # by an earlier version
    one, two = ({name: value for name, value in each.search.items() if name not in unsaid} for each in (run, other))
    for search in (one, two):
        if "checkpoint" in search:
            search["checkpoint"] = re.sub(r"\d+", "", search["checkpoint"])  # best-epoch=3.ckpt, each seed has another
    return one == two


def _begun_alike(run: Run, other: Run) -> bool:
    """Whether both began with the same weights, or each with those of runs with its own seed."""
    named, of_their_seed = [], []
    for each in (run, other):
        settings, seed = settings_of(each), each.settings.get("seed_everything")
        named.append({key: str(settings[key] or "") for key in sorted(settings) if _is_beginning(key)})
        named[-1].setdefault(_BEGIN, "")
        of_their_seed.append({key: of_any_seed(checkpoint, seed) for key, checkpoint in named[-1].items()})
    return named[0] == named[1] or of_their_seed[0] == of_their_seed[1]


def _is_beginning(key: str) -> bool:
    """Whether a setting names a checkpoint that a run began with, or that it is a mean of."""
    return key == _BEGIN or (key.startswith("averaged.") and key.endswith(".checkpoint"))


def _agree(some: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether settings are the same; one that is off may be missing: earlier versions lack the newest options."""
    for key, value in {**some, **others}.items():
        default = value == _ON[key] if key in _ON else value in _OFF
        if not (some[key] == others[key] if key in some and key in others else default):
            return False
    return True


def _common_name(names: Sequence[str], seeds: Sequence[str]) -> str:
    """What names have in common but for the seed at their end: soft_1 and soft_10 are of soft."""
    stems = {name.removesuffix(seed).rstrip(_SEPARATORS) for name, seed in zip(names, seeds, strict=True)}
    return stems.pop() or names[0] if len(stems) == 1 else f"{names[0]} and other seeds"


def _going_on_from(first: Group, group: Group, runs: Mapping[str, Run]) -> list[str] | None:
    """Return the runs of a group, each at the place of the run of ``first`` that it began with or is a mean with.

    None if there are not as many, or too few for a test of pairs.
    """
    found = []
    for name in first.runs:
        folder = runs[name].folder
        own = [run for run in group.runs if folder is not None and folder.resolve().name in _begun_with(runs[run])]
        found += own if len(own) == 1 else []
    return found if len(set(found)) == len(first.runs) == len(group.runs) >= LEAST_PAIRS else None


def _begun_with(run: Run) -> set[str]:
    """The names of the run folders whose checkpoints a run began with, or is a mean of."""
    settings = settings_of(run)
    checkpoints = (Path(str(settings[key])) for key in settings if _is_beginning(key) and settings[key])
    return {path.parent.parent.name for path in checkpoints}


class _Measure(NamedTuple):
    """Scores that are functions of the same counts: by run, (images, C)."""

    keys: tuple[str, ...]
    titles: tuple[str, ...]
    counts: dict[str, Floats]
    scores: Score


def compare_groups(
    result: Comparison,
    scored: Scored,
    counted: Mapping[str, list[tuple[Family, Floats]]],
    groups: list[Group],
    runs: Mapping[str, Run],
) -> None:
    """Add mean and deviation of every group, and its tests against the first one, as the first table."""
    result.groups = groups
    first, *others = groups
    tests: dict[tuple[str, str], Difference] = {}
    titles: dict[str, str] = {}
    going_on = {group.name: ordered for group in others if (ordered := _going_on_from(first, group, runs)) is not None}
    for measure in _measures(scored, counted):
        titles |= dict(zip(measure.keys, measure.titles, strict=True))
        having = [group for group in groups if all(run in measure.counts for run in group.runs)]
        stacked = {group.name: [measure.counts[run] for run in group.runs] for group in having}
        for group in having:
            values = [np.atleast_1d(measure.scores(counts.sum(axis=0))) for counts in stacked[group.name]]
            for number, key in enumerate(measure.keys):
                group.scores[key] = [float(value[number]) for value in values]
        for group in others:
            if scored.common and len(first.runs) > 1 < len(group.runs) and first in having and group in having:
                found = seed_differences(
                    np.stack(stacked[first.name]),
                    np.stack([measure.counts[run] for run in going_on.get(group.name, group.runs)]),
                    measure.scores,
                    paired=group.name in going_on,
                    resamples=scored.resamples,
                    seed=scored.seed,
                )
                tests |= {(group.name, key): test for key, test in zip(measure.keys, found, strict=True)}
    for (name, key), test in zip(tests, holm(list(tests.values())), strict=True):
        result.group_tests.setdefault(name, {})[key] = test
    for group in groups:
        for key, title in _OWN_SCORES.items():
            if all(key in runs[run].scores for run in group.runs):
                titles[key] = title
                group.scores[key] = [runs[run].scores[key] for run in group.runs]
    _say(result)
    rows = [Row(title, [_cell(result, group, key) for group in groups]) for key, title in titles.items()]
    note = (
        "Mean and standard deviation of the runs that differ in their seed alone. Below: the difference "
        "from the first variant with its 95 % interval and p-value, over images and seeds (analysis of variance of "
        f"Obuchowski and Rockette, covariances from {scored.resamples} bootstraps of the images)."
    )
    if going_on:
        note += f" Paired, each run with the one of {first.name} that it goes on from: {', '.join(going_on)}."
    columns = [group.name for group in groups]
    result.tables.insert(0, Table("Variants over seeds", rows, note + CORRECTED * bool(tests), columns))


def _measures(scored: Scored, counted: Mapping[str, list[tuple[Family, Floats]]]) -> Iterator[_Measure]:
    families = {family.names: family for found in counted.values() for family, _ in found}
    for names, family in families.items():
        counts = {run: c for run, found in counted.items() for other, c in found if other.names == names}
        yield _Measure(names, tuple(TITLES[name] for name in names), counts, family.scores)
    for where, of in CAPTIONS.items():
        for title, column in ((title, column) for title, (column, own) in GROUNDING.items() if own):
            found = {name: noun_counts(captions, ids, of, column) for name, captions, ids in scored.images()}
            judged = {name: counts for name, counts in found.items() if counts is not None}
            if judged:
                yield _Measure((key_of(title + where),), (title + where,), judged, share)


def _say(result: Comparison) -> None:
    """Add the sentence of every variant that is tested, and a notice on those that cannot be."""
    first, *others = result.groups
    title, metric = TITLES[result.metric], result.metric
    for group in others:
        test = result.group_tests.get(group.name, {}).get(metric)
        if test is not None:
            change = test.interval.value
            result.verdicts[group.name] = (
                f"{group.name} scores {title} {group.mean(metric):.2f} (mean of {len(group.runs)} seeds), "
                f"{abs(change):.2f} {'higher' if change > 0 else 'lower'} than {first.name} "
                f"({first.mean(metric):.2f}, {len(first.runs)} seeds): {finding(test)}, over images and seeds."
            )
    single = [group.name for group in result.groups if len(group.runs) == 1]
    if single and len(result.groups) > 1:
        several = (
            "have one seed each: differences from them" if len(single) > 1 else "has one seed: differences from it"
        )
        result.notices.append(f"{', '.join(single)} {several} are not tested over seeds.")


def _cell(result: Comparison, group: Group, key: str) -> Cell:
    if key not in group.scores:
        return Cell("")
    mean, deviation = group.mean(key), group.deviation(key)
    detail = "" if deviation is None else f"deviation {deviation:.2f} of {len(group.runs)} seeds"
    test = result.group_tests.get(group.name, {}).get(key)
    if test is None:
        return Cell(f"{mean:.2f}", detail, value=mean)
    change = f"{test.interval.value:+.2f} ({range_text(test.interval, signed=True)}), {p_text(test.corrected)}"
    return Cell(f"{mean:.2f}", detail, change, test.clear, value=mean)
