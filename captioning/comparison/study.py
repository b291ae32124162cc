"""A study: variants of configurations that are trained with the same seeds, read from a YAML of configs/studies.

The keys of the file are the attributes of ``Study``, those of a variant the attributes of ``Variant``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from captioning.comparison.measurements import score_name
from captioning.errors import InputError, did_you_mean
from captioning.settings import read_config

Kind = TypeVar("Kind", bound=Struct)

_WORDS = {  # of msgspec's messages -> of YAML
    "Object contains unknown field": "unknown key",
    "Object missing required field": "missing key",
    "`array`": "a list",
    "`object`": "a mapping",
}


class Variant(Struct, frozen=True, forbid_unknown_fields=True):
    """One of the things that are compared: either a configuration to train, or an average of other variants.

    Attributes:
        config: A file of configs/, without its ending.
        label: The variant's name in tables. Defaults to its key.
        fit: Further options of ``captioning fit``, each --name=value.
        after: A variant above this one, whose best checkpoint of the same seed training starts from (--init_from).
        average: Two or more variants above this one, whose best checkpoints of the same seed are averaged.
        evaluations: By name, options of ``captioning evaluate`` for one more score.
    """

    config: str | None = None
    label: str = ""
    fit: list[str] = []
    after: str | None = None
    average: Annotated[list[str], Meta(min_length=2)] | None = None
    evaluations: dict[str, list[str]] = {}

    @property
    def begins_with(self) -> list[str]:
        """The variants whose checkpoints are needed before this one."""
        return self.average or ([] if self.after is None else [self.after])


class Features(Struct, frozen=True, forbid_unknown_fields=True):
    """The features that ``captioning extract`` computes before any training.

    Attributes:
        config: A file of configs/, without its ending.
        splits: The splits to encode.
        output: The folder of the features.
        flipped: Whether to encode the mirrored training images, too.
    """

    config: str
    splits: list[str]
    output: str
    flipped: bool = False


class Study(Struct, frozen=True, forbid_unknown_fields=True):
    """A study.

    Attributes:
        name: The study's name. Run folders are NAME_VARIANT_SEED, and the scores stand in docs/measurements/NAME.json.
        seeds: Seeds of every variant.
        variants: By name, what is compared.
        fit: Options of ``captioning fit`` for all variants, such as --config=overlay.yaml.
        evaluate: Options of ``captioning evaluate`` for all variants.
        features: Features to extract first.
        references: The variants that all others are compared with.
    """

    name: str
    seeds: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
    variants: Annotated[dict[str, Variant], Meta(min_length=1)]
    fit: list[str] = []
    evaluate: list[str] = []
    features: Features | None = None
    references: list[str] = []

    def starts_from(self, variant: str, earlier: str) -> bool:
        """Return whether runs of ``variant`` start from, or are averages of, those of ``earlier``, in any stage."""
        before = self.variants[variant].begins_with
        return earlier in before or any(self.starts_from(name, earlier) for name in before)

    def label(self, variant: str) -> str:
        return self.variants[variant].label or variant

    def run_name(self, variant: str, seed: int) -> str:
        """Return the name of a run's folder."""
        return f"{self.name}_{score_name(variant, seed)}"

    def measurements(self, folder: Path) -> Path:
        """Return the file of the scores."""
        return folder / f"{self.name}.json"


def read_study(path: Path, configs: Path) -> Study:
    """Read a study.

    Args:
        path: The study's file.
        configs: The folder of the configurations.

    Raises:
        InputError: The file cannot be read, a value is missing, unknown or of the wrong type, or a config is missing.
    """
    content = read_config(path)
    try:
        variants = content.get("variants")
        for name, variant in variants.items() if isinstance(variants, dict) else ():
            _convert(variant, Variant, f"variants.{name}")  # the error of the whole study would not name the variant
        study = _convert(content, Study)
        _check(study, [config.stem for config in configs.glob("*.yaml")])
    except ValueError as error:
        raise InputError(f"{path}: {str(error)[:300]}") from error
    return study


def _convert(content: Any, kind: type[Kind], place: str = "") -> Kind:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at ")
        for theirs, ours in _WORDS.items():
            problem = problem.replace(theirs, ours)
        if where.startswith("`key` in "):
            problem, where = f"a key: {problem}", where.removeprefix("`key` in ")
        place = (place + where.strip("`").removeprefix("$")).lstrip(".")
        if problem.startswith("unknown key"):
            keys = {*Study.__struct_fields__, *Variant.__struct_fields__, *Features.__struct_fields__}
            problem += _meant(problem.split("`")[1], keys)
        raise ValueError(f"{place}: {problem}" if place else problem) from error


def _check(study: Study, configs: Collection[str]) -> None:
    """Check what relates values to each other.

    Raises:
        ValueError: A name stands for nothing, or two things have one name.
    """
    _check_names([study.name], "name")
    _check_names(study.variants, "variants")
    if len(set(study.seeds)) < len(study.seeds):
        raise ValueError(f"seeds: {study.seeds} has a seed twice")
    for reference in study.references:
        if reference not in study.variants:
            raise ValueError(f"references: {reference} is no variant{_meant(reference, study.variants)}")
    if study.features is not None:
        _check_config(study.features.config, "features", configs)
    above: set[str] = set()
    for name, variant in study.variants.items():
        place = f"variants.{name}"
        _check_names(variant.evaluations, f"{place}.evaluations")
        if (variant.config is None) == (variant.average is None):
            raise ValueError(f"{place}: needs either a config or an average")
        if variant.config is not None:
            _check_config(variant.config, place, configs)
        elif variant.fit or variant.after:
            raise ValueError(f"{place}: an average is not trained; leave out fit and after")
        for earlier in variant.begins_with:
            if earlier not in above:
                key = "average" if variant.average else "after"
                raise ValueError(f"{place}.{key}: {earlier!r} is no variant above it")
        above.add(name)
    names = Counter(
        score_name(name, seed, evaluation)
        for name, variant in study.variants.items()
        for seed in study.seeds
        for evaluation in ("", *variant.evaluations)
    )
    (twice, count), *_ = names.most_common(1)
    if count > 1:
        raise ValueError(f"variants: two scores would have the name {twice}; rename a variant or an evaluation")


def _check_names(names: Collection[str], place: str) -> None:
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][\w-]*", name):
            raise ValueError(f"{place}: {name!r:.80} is no name of letters, digits, - and _")


def _check_config(name: str, place: str, configs: Collection[str]) -> None:
    if name not in configs:
        raise ValueError(f"{place}.config: there is no {name[:80]}.yaml{_meant(name, configs)}")


def _meant(name: str, names: Collection[str]) -> str:
    return did_you_mean(name, names) or f"; there are {', '.join(sorted(names))}"
