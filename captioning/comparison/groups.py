"""Runs that differ in their seed alone are one variant: which runs these are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from captioning.comparison.conditions import settings_of
from captioning.comparison.result import Group
from captioning.comparison.runs import Run, classes
from captioning.run_folder import of_any_seed

_SEEDS = ("seed_everything", "data.seed")
_SEPARATORS = "_-. /"


def group_by_seed(runs: Sequence[Run]) -> list[Group]:
    """Return the variants in the order of the runs.

    A run whose settings are not known is a group of its own. Two runs of one seed are never in one group, because the
    same run would count twice. Decoding options count only between runs that were tested.
    """
    variants: list[dict[str, Run]] = []  # the runs of a variant by seed
    for run in runs:
        seed = _seed_of(run)
        for variant in variants:
            if seed not in variant and _differ_in_seed_alone(run, next(iter(variant.values()))):
                variant[seed] = run
                break
        else:
            variants.append({seed: run})
    taken = {run.name for run in runs}
    groups = []
    for variant in variants:
        names = [run.name for run in variant.values()]
        name = names[0] if len(names) == 1 else _common_name(names, list(variant))
        while len(names) > 1 and name in taken:
            name += " (seeds)"
        taken.add(name)
        groups.append(Group(name, names, list(variant)))
    return groups


def _seed_of(run: Run) -> str:
    settings = settings_of(run)
    return next((str(settings[key]) for key in _SEEDS if settings.get(key) is not None), "")


def _differ_in_seed_alone(run: Run, other: Run) -> bool:
    return bool(
        run.settings
        and other.settings
        and _seed_of(run)
        and _without_seed(run) == _without_seed(other)
        and list(classes(run.settings)) == list(classes(other.settings))
        and (not run.captions or not other.captions or _search_of(run) == _search_of(other))
        and _start_from_alike(run, other)
    )


def _without_seed(run: Run) -> dict[str, Any]:
    settings = settings_of(run)
    return {key: value for key, value in settings.items() if key not in _SEEDS and not _is_start(key)}


def _search_of(run: Run) -> dict[str, Any]:
    """Return the decoding options, without the epoch of the tested checkpoint, which differs between seeds."""
    return {
        name: re.sub(r"\d+", "", str(value)) if name == "checkpoint" else value  # best-epoch=3.ckpt
        for name, value in run.search.items()
    }


def _start_from_alike(run: Run, other: Run) -> bool:
    """Return whether both runs started from the same weights, or each from those of a run with its own seed."""
    same, same_but_for_seed = [], []
    for member in (run, other):
        seed = member.settings.get("seed_everything")
        starts = {key: str(value) for key, value in settings_of(member).items() if _is_start(key) and value}
        same.append(starts)
        same_but_for_seed.append({key: of_any_seed(checkpoint, seed) for key, checkpoint in starts.items()})
    return same[0] == same[1] or same_but_for_seed[0] == same_but_for_seed[1]


def _is_start(key: str) -> bool:
    """Return whether a setting names a checkpoint that a run started from, or that it is an average of."""
    return key == "init_from" or (key.startswith("averaged.") and key.endswith(".checkpoint"))


def _common_name(names: Sequence[str], seeds: Sequence[str]) -> str:
    """Return what names share before their seeds: soft_1 and soft_10 belong to soft."""
    stems = {name.removesuffix(seed).rstrip(_SEPARATORS) for name, seed in zip(names, seeds, strict=True)}
    return stems.pop() or names[0] if len(stems) == 1 else f"{names[0]} and other seeds"


Pairing = Callable[[Group, Group], "list[str] | None"]
"""Returns the runs of the second group, each at the place of its run of the first, or None."""


def pairs_by_settings(runs: Mapping[str, Run]) -> Pairing:
    """Return the pairing of groups whose runs started from each other, in either order, or are averages with them."""

    def pairing(reference: Group, group: Group) -> list[str] | None:
        paired = []
        for name in reference.runs:
            folder = runs[name].folder
            followers = [run for run in group.runs if folder and _follow(runs[run], runs[name])]
            paired += followers if len(followers) == 1 else []
        complete = len(set(paired)) == len(reference.runs) == len(group.runs)
        return paired if complete else None

    return pairing


def _follow(run: Run, other: Run) -> bool:
    """Return whether one of two runs started from the other, or is an average with it."""
    return any(
        one.folder is not None and one.folder.resolve().name in _started_from(two)
        for one, two in ((run, other), (other, run))
    )


def _started_from(run: Run) -> set[str]:
    """Return the names of the run folders whose checkpoints a run started from, or is an average of."""
    checkpoints = (Path(str(value)) for key, value in settings_of(run).items() if _is_start(key) and value)
    return {path.parent.parent.name for path in checkpoints}
