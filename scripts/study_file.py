"""The file of a study, such as those in configs/studies: the runs to train, to score and to compare."""

from pathlib import Path

import msgspec

from captioning.errors import InputError, did_you_mean
from captioning.settings import read_config

REPOSITORY = Path(__file__).resolve().parent.parent
TRAINING = {  # log key after train/ -> title in the table of the training
    "attention_entropy": "entropy of alpha (nats)",
    "support_size": "locations in the support",
    "beta": "beta",
    "reward": "return",
    "baseline": "baseline",
    "advantage_std": "deviation of the advantage",
}


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A configuration to train, or an average of other variants.

    Attributes:
        config: A file of configs/, without .yaml.
        label: The variant's name in tables, by default its key.
        fit: Further options of ``captioning fit``, each --name=value.
        after: A variant above this one. Training starts from its best checkpoint of the same seed (--init_from).
        average: Two or more variants above this one. Their best checkpoints of the same seed are averaged.
        evaluations: Options of a further ``captioning test``, by the name of its score.
    """

    config: str | None = None
    label: str = ""
    fit: list[str] = []
    after: str | None = None
    average: list[str] = []
    evaluations: dict[str, list[str]] = {}

    @property
    def initial_variants(self) -> list[str]:
        """The variants whose checkpoints this one starts from or averages."""
        return self.average or ([] if self.after is None else [self.after])


class Features(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The features that ``captioning extract`` computes before any training, of ``splits`` into ``output``."""

    config: str
    splits: list[str]
    output: str
    flipped: bool = False


class Study(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A study.

    Attributes:
        name: The study's name. Run folders are NAME_VARIANT_SEED, and the scores stand in docs/measurements/NAME.json.
        seeds: Seeds of every variant.
        variants: The variants by name.
        fit: Options of ``captioning fit`` for all variants, such as --config=overlay.yaml.
        evaluate: Options of ``captioning test`` for all variants.
        features: Features to extract first.
        references: The variants that all others are compared with.
    """

    name: str
    seeds: list[int]
    variants: dict[str, Variant]
    fit: list[str] = []
    evaluate: list[str] = []
    features: Features | None = None
    references: list[str] = []

    def starts_from(self, variant: str, earlier: str) -> bool:
        """Return whether ``variant`` starts from or averages ``earlier``, directly or through other variants."""
        initial_variants = self.variants[variant].initial_variants
        return earlier in initial_variants or any(self.starts_from(name, earlier) for name in initial_variants)

    def label(self, variant: str) -> str:
        return self.variants[variant].label or variant


def read_study(path: Path) -> Study:
    """Read a study.

    Raises:
        InputError: A value is missing, unknown or of the wrong type, or a name refers to nothing that exists.
    """
    try:
        study = msgspec.convert(read_config(path), Study)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: {error}") from error
    if study.name != path.stem:  # a copy of another study, whose runs would be taken for its own
        raise InputError(f"{path}: name is {study.name}, and names folders of runs; give it the file's, {path.stem}")
    variants_above: list[str] = []
    for name, variant in study.variants.items():
        if (variant.config is None) == (not variant.average):
            raise InputError(f"{path}: variants.{name}: needs either a config or an average")
        if variant.config is not None and not config_of(variant.config).is_file():
            raise InputError(f"{path}: variants.{name}: there is no {config_of(variant.config)}")
        if unknown := [initial for initial in variant.initial_variants if initial not in variants_above]:
            raise InputError(f"{path}: variants.{name}: {unknown[0]} is no variant above it")
        variants_above.append(name)
    if unknown := [name for name in study.references if name not in study.variants]:
        raise InputError(f"{path}: references: {unknown[0]} is no variant{did_you_mean(unknown[0], study.variants)}")
    return study


def config_of(name: str) -> Path:
    return REPOSITORY / "configs" / f"{name}.yaml"
