"""Names of version 0.2 in files and on command lines, each with its new name. A renamed option gets an entry here."""

from typing import Any

MODEL = {"normaliser": "normalizer", "inference": "context_mode"}
MODEL |= {"standardize": "feature_norm", "centres": "centers", "batches": ""}
"""Arguments, modules and buffers of a model, read by ``component``; "" for one that was removed."""

SETTINGS = ("data", "test_split", "split"), ("model", "bound_samples", "bound_draws")
"""Settings by section and name, each with its option of `captioning test`; read by ``settings``."""

REMOVED_OPTIONS: dict[str, dict[str, Any]] = {"SelfCriticalTraining": {"baseline": "leave_one_out"}}
REMOVED_OPTIONS |= {"ConvEncoder": {"learning_rate": None}, "MovingAverage": {"initial": None}}
REMOVED_OPTIONS |= {"TorchvisionEncoder": dict.fromkeys(("mean", "std", "model_args"))}
REMOVED_OPTIONS |= {"TimmEncoder": {"mean": None, "std": None}}
"""Options that are gone, by class, with the defaults in the ``config.yaml`` of an earlier run; read by ``settings``."""

SUGGESTIONS = {"inference": "context_mode", "normaliser": "normalizer"}
SUGGESTIONS |= dict.fromkeys(("per_word", "all_captions"), "ArcticMovingAverage") | {"samples": "caption --count"}
SUGGESTIONS |= {name: f"captioning test --{option}" for _, name, option in SETTINGS}
"""Names that an error suggests in place of unknown ones; read by ``errors``."""


def renamed_results(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an object of a JSON file of a test by its new names: conditions, or a ``NounHit``."""
    names = {"search": "conditions", "inference": "context_mode", "bound_samples": "bound_draws"}
    names |= {"centre_hit": "center_hit", "uniform": "uniform_correctness", "centre": "center_correctness"}
    return {names.get(name, name): value for name, value in entry.items()}


def is_schedule_in_batches(name: str, value: Any) -> bool:
    """Return whether an argument of a checkpoint's model is a schedule of version 0.2.0, which counted batches."""
    return name in ("anneal", "final_temperature") or (name == "ramp" and max(value or (0,)) > 1)
