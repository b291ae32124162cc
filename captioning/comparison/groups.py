"""Grouping runs into variants: the runs of a variant differ only in their seed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from captioning.comparison.conditions import settings_of
from captioning.comparison.result import Group
from captioning.comparison.runs import Run

_SEEDS = ("seed_everything", "data.seed")


def group_by_seed(runs: Sequence[Run]) -> list[Group]:
    """Return the variants in the order of the runs.

    A run with unknown settings is a group of its own. Two runs of one seed are never in one group: they would be the
    same run, counted twice. Decoding options are compared only between tested runs.
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
        names, seeds = [run.name for run in variant.values()], list(variant)
        name = names[0]
        if len(names) > 1:
            # The common part before the seeds: soft_1 and soft_10 are soft.
            stems = {name.removesuffix(seed).rstrip("_-. /") for name, seed in zip(names, seeds, strict=True)}
            name = stems.pop() or name if len(stems) == 1 else f"{name} and other seeds"
            while name in taken:
                name += " (seeds)"
        taken.add(name)
        groups.append(Group(name, names, seeds))
    return groups


def _seed_of(run: Run) -> str:
    settings = settings_of(run)
    return next((str(settings[key]) for key in _SEEDS if settings.get(key) is not None), "")


def _differ_in_seed_alone(run: Run, other: Run) -> bool:
    return bool(
        run.settings
        and other.settings
        and _seed_of(run)
        and (not run.captions or not other.captions or _search(run) == _search(other))
        # Both started from the same weights, or each from those of a run with its own seed.
        and any(_without_seed(run, starred) == _without_seed(other, starred) for starred in (False, True))
    )


def _search(run: Run) -> dict[str, Any]:
    """Return the decoding options, without the epoch of best-epoch=3.ckpt, which differs between seeds."""
    return run.search | {"checkpoint": re.sub(r"\d+", "", str(run.search.get("checkpoint")))}


def _without_seed(run: Run, starred: bool) -> dict[str, Any]:
    """Return the settings without the seed; if ``starred``, also replace it in paths of initial checkpoints."""
    settings = {key: value for key, value in settings_of(run).items() if key not in _SEEDS}
    seed = re.compile(rf"(?<!\d){re.escape(_seed_of(run))}(?=/checkpoints/[^/]*$)")
    for key, value in settings.items():
        if starred and value and re.fullmatch(r"init_from|averaged\..*\.checkpoint", key):
            settings[key] = seed.sub("*", str(value))
    return settings
