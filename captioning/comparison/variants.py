"""Which runs differ in their seed alone."""

import re
from collections.abc import Sequence
from typing import Any

from captioning.comparison.result import Variant
from captioning.comparison.runs import Run
from captioning.settings import SEED_SETTINGS, STORAGE_SETTINGS, flatten

# Settings that may differ between the runs of a variant: storage, logging, and a leftover of version 0.2.
_NOT_COMPARED = (*STORAGE_SETTINGS, "data.feature_shares")


def group_variants(runs: Sequence[Run]) -> list[Variant]:
    """Return the variants in the order of the runs.

    A run with unknown settings is a variant of its own. Two runs with one seed are never one variant: one result
    would count twice. Decoding options are compared only between runs with captions.
    """
    runs_by_seed: list[dict[str, Run]] = []  # one dict for each variant
    for run in runs:
        seed = _seed_of(run)
        for by_seed in runs_by_seed:
            if seed not in by_seed and _differ_in_seed_alone(run, next(iter(by_seed.values()))):
                by_seed[seed] = run
                break
        else:
            runs_by_seed.append({seed: run})
    used_names, variants = {run.name for run in runs}, []
    for by_seed in runs_by_seed:
        names, seeds = [run.name for run in by_seed.values()], list(by_seed)
        name = names[0]
        if len(names) > 1:
            # The variant has the name before the seeds: soft_1 and soft_10 are runs of soft.
            stems = {name.removesuffix(seed).rstrip("_-. /") for name, seed in zip(names, seeds, strict=True)}
            name = stems.pop() or name if len(stems) == 1 else f"{name} and other seeds"
            while name in used_names:
                name += " (seeds)"
        used_names.add(name)
        variants.append(Variant(name, names, seeds))
    return variants


def compared_settings(run: Run) -> dict[str, Any]:
    """Return a run's flat settings, without those that may differ between the runs of a variant."""
    return flatten(run.settings, without=_NOT_COMPARED)


def _seed_of(run: Run) -> str:
    settings = compared_settings(run)
    return next((str(settings[key]) for key in SEED_SETTINGS if settings.get(key) is not None), "")


def _differ_in_seed_alone(run: Run, other: Run) -> bool:
    have_settings = bool(run.settings and other.settings and _seed_of(run))
    have_same_conditions = not run.captions or not other.captions or _conditions(run) == _conditions(other)
    # Equal as they are, or equal without the seeds in the paths of their initial checkpoints.
    have_same_settings = any(one == two for one, two in zip(_without_seed(run), _without_seed(other), strict=True))
    return have_settings and have_same_conditions and have_same_settings


def _conditions(run: Run) -> dict[str, Any]:
    """Return the conditions of the test without digits in the checkpoint's name: best-epoch=3 differs between seeds."""
    return run.conditions | {"checkpoint": re.sub(r"\d+", "", str(run.conditions.get("checkpoint")))}


def _without_seed(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings without the seed, and these settings with * for the seed in paths of initial checkpoints."""
    settings = {key: value for key, value in compared_settings(run).items() if key not in SEED_SETTINGS}
    seed_in_path = re.compile(rf"(?<!\d){re.escape(_seed_of(run))}(?=/checkpoints/[^/]*$)")
    initial_keys = [key for key in settings if re.fullmatch(r"init_from|averaged\..*\.checkpoint", key)]
    return settings, settings | {key: seed_in_path.sub("*", str(settings[key])) for key in initial_keys}
