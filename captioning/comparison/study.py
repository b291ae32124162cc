"""A study: variants of configurations that are trained with the same seeds, read from a YAML of configs/studies.

Keys:
    name: the study's; a run is runs/NAME_VARIANT_SEED, its scores are NAME_VARIANT_SEED.json.
    runs: NAME in these two, if not the study's own: another study's, to share the runs that both have.
    seeds: whole numbers.
    variants: by name, what is compared, each with
        config: a file of configs/, without its ending.
        label: how tables call it (default: the name).
        fit: further options of ``captioning fit``, each --name=value.
        after: a variant above it, whose best checkpoint of the same seed a second stage begins with (--init_from).
        average: variants above it, whose best checkpoints of the same seed are averaged; without config, fit and after.
        evaluations: by name, options of scripts/evaluate.py for one more score, NAME_VARIANT_SEED_EVALUATION.json.
    fit: options of ``captioning fit`` for all variants, such as --config=overlay.yaml.
    evaluate: options of scripts/evaluate.py for all.
    features: what scripts/extract_features.py is to compute first: config, splits and output; with
        flipped: true also the mirrored training images.
    references: variants that the others are compared with.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from captioning.errors import InputError
from captioning.settings import read_config

_NAME = re.compile(r"[A-Za-z0-9][\w-]*")


@dataclass(frozen=True)
class Variant:
    """Options of commands are lists of words; evaluations are by name. Without a config it is an average."""

    name: str
    label: str
    config: Path | None
    fit: list[str]
    after: str | None
    average: list[str]
    evaluations: dict[str, list[str]]

    @property
    def begins_with(self) -> list[str]:
        """The variants whose checkpoints it needs."""
        return self.average if self.after is None else [self.after]


@dataclass(frozen=True)
class Features:
    config: Path
    splits: list[str]
    output: Path
    flipped: bool


@dataclass(frozen=True)
class Study:
    path: Path
    name: str
    runs: str
    seeds: list[int]
    variants: dict[str, Variant]
    fit: list[str]
    evaluate: list[str]
    features: Features | None
    references: list[str]

    def goes_on_from(self, variant: str, other: str) -> bool:
        """Whether a variant's runs begin with those of another, or are means with them, at whatever remove."""
        before = self.variants[variant].begins_with
        return other in before or any(self.goes_on_from(first, other) for first in before)

    def run_name(self, variant: str, seed: int, evaluation: str = "") -> str:
        """Return the name of a run, or of one of its further evaluations."""
        return f"{self.runs}_{variant}_{seed}" + (f"_{evaluation}" if evaluation else "")


def read_study(path: Path, configs: Path) -> Study:
    """Read a study.

    Args:
        configs: the folder of the configurations.

    Raises:
        InputError: the file cannot be read, a key is unknown, missing or of another kind, or a config is missing.
    """
    return _Reader(path, configs).study(read_config(path))


class _Reader:
    """Checks every value and names its place in the file in errors."""

    def __init__(self, path: Path, configs: Path) -> None:
        self.path, self.configs = path, configs

    def study(self, content: dict[str, Any]) -> Study:
        known = {"name", "runs", "seeds", "variants", "fit", "evaluate", "features", "references"}
        self._check_keys(content, "", known, needed=("name", "seeds", "variants"))
        seeds = content["seeds"]
        if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
            raise self._error("seeds", f"must be whole numbers, got {seeds!r}")
        if len(set(seeds)) < len(seeds):
            raise self._error("seeds", f"{seeds} has one twice")
        variants = self._mapping(content["variants"], "variants")
        if not variants:
            raise self._error("variants", "there is none")
        references = self._words(content.get("references", []), "references")
        if unknown := sorted(set(references) - set(variants)):
            raise self._error("references", f"{unknown[0]} is no variant{_meant(unknown[0], variants)}")
        features = content.get("features")
        study = Study(
            path=self.path,
            name=self._name(content["name"], "name"),
            runs=self._name(content.get("runs", content["name"]), "runs"),
            seeds=seeds,
            variants=self._variants(variants),
            fit=self._words(content.get("fit", []), "fit"),
            evaluate=self._words(content.get("evaluate", []), "evaluate"),
            features=None if features is None else self._features(self._mapping(features, "features")),
            references=references,
        )
        names = [
            study.run_name(variant.name, seed, evaluation)
            for variant in study.variants.values()
            for seed in seeds
            for evaluation in ("", *variant.evaluations)
        ]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise self._error("variants", f"two scores would be {twice}.json; rename a variant or an evaluation")
        return study

    def _variants(self, content: Mapping[Any, Any]) -> dict[str, Variant]:
        variants: dict[str, Variant] = {}
        for name, value in content.items():
            variant = self._variant(self._name(name, "variants"), value)
            key = "average" if variant.average else "after"
            for before in variant.begins_with:
                if before not in list(variants):  # a list: it may be of any type
                    raise self._error(f"variants.{name}.{key}", f"{before!r} is no variant above it")
            variants[name] = variant
        return variants

    def _variant(self, name: str, value: Any) -> Variant:
        place = f"variants.{name}"
        content = self._mapping(value, place)
        keys, needed = {"label", "config", "fit", "after", "evaluations"}, "config"
        if "average" in content:
            keys, needed = {"label", "average", "evaluations"}, "average"
        self._check_keys(content, place, keys, needed=(needed,))
        average = self._words(content.get("average", []), f"{place}.average")
        if "average" in content and len(average) < 2:
            raise self._error(f"{place}.average", f"must be at least two variants, got {average}")
        evaluations = self._mapping(content.get("evaluations", {}), f"{place}.evaluations")
        return Variant(
            name=name,
            label=str(content.get("label", name)),
            config=self._config(content["config"], f"{place}.config") if "config" in content else None,
            fit=self._words(content.get("fit", []), f"{place}.fit"),
            after=content.get("after"),
            average=average,
            evaluations={
                self._name(other, f"{place}.evaluations"): self._words(options, f"{place}.evaluations.{other}")
                for other, options in evaluations.items()
            },
        )

    def _features(self, content: Mapping[str, Any]) -> Features:
        keys = ("config", "splits", "output")
        self._check_keys(content, "features", {*keys, "flipped"}, needed=keys)
        output, flipped = content["output"], content.get("flipped", False)
        if not isinstance(output, str):
            raise self._error("features.output", f"must be a folder, got {output!r}")
        if not isinstance(flipped, bool):
            raise self._error("features.flipped", f"must be true or false, got {flipped!r}")
        splits = self._words(content["splits"], "features.splits")
        return Features(self._config(content["config"], "features.config"), splits, Path(output), flipped)

    def _check_keys(self, content: Mapping[str, Any], place: str, known: set[str], *, needed: Collection[str]) -> None:
        for key in content:
            if key not in known:
                raise self._error(place, f"{key!r} is no key of a study{_meant(str(key), known)}")
        for key in needed:
            if key not in content:
                raise self._error(place, f"{key} is missing")

    def _config(self, name: Any, place: str) -> Path:
        path = self.configs / f"{name}.yaml"
        known = [other.stem for other in self.configs.glob("*.yaml")]
        if name not in known:
            raise self._error(place, f"{str(path)[:120]} is not there{_meant(str(name), known)}")
        return path

    def _mapping(self, value: Any, place: str) -> Mapping[Any, Any]:
        if not isinstance(value, dict):
            raise self._error(place, f"must be a mapping, got {value!r}")
        return value

    def _words(self, value: Any, place: str) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self._error(place, f"must be a list of words, such as [--beam_size=3], got {value!r}")
        return value

    def _name(self, value: Any, place: str) -> str:
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise self._error(place, f"{value!r} is no name of letters, digits, - and _")
        return value

    def _error(self, place: str, problem: str) -> InputError:
        return InputError(f"{self.path}: " + (f"{place}: " if place else "") + problem[:300])


def _meant(name: str, known: Collection[Any]) -> str:
    names = sorted(map(str, known))
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(names)}"
