"""How runs were made: speed, size, decoding, settings and curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from captioning.comparison.result import Cell, Row, Table
from captioning.comparison.runs import Curve, Run
from captioning.metrics.table import TITLES
from captioning.run_folder import LOCATION_SETTINGS, attention_kind, flat

_SEARCH = {
    "Split of the test": "split",
    "Checkpoint of the test": "checkpoint",
    "Context in the test": "inference",
    "Tokenizer, if not English": "tokenizer",
    "Beam size in the test": "beam_size",
}
# Settings that make no variant: storage and logging, the tested split (a row of its own), leftovers of old versions.
_NO_VARIANT = (*LOCATION_SETTINGS, "data.test_split", "data.feature_shares")


def ordered_curves(runs: Sequence[Run], metric: str) -> dict[str, dict[str, Curve]]:
    """Return the curves by log key and run, the most important keys first, without those of controls."""
    leading = [f"val/{metric}", "val/nll", "val/pointing_accuracy", "val/attention_correctness", "train/loss"]
    keys = sorted({key for run in runs for key in run.curves if "/" in key and "_controls/" not in key})
    ordered = sorted(keys, key=[*leading, *keys].index)
    return {key: {run.name: run.curves[key] for run in runs if run.curves.get(key)} for key in ordered}


def condition_tables(runs: Sequence[Run], metric: str) -> list[Table]:
    """Return the table of speed, size and decoding, unless it is empty, and the table of settings that differ."""
    modes, names = sorted({mode for run in runs for mode in run.contexts}), [run.name for run in runs]
    values = {
        "Training, captions per second": [Cell.plain(run.captions_per_second, "{:,.0f}") for run in runs],
        "Parameters, decoder": [Cell.plain(run.parameters.get("decoder"), "{:,.0f}") for run in runs],
        "Parameters, encoder": [Cell.plain(run.parameters.get("encoder"), "{:,.0f}") for run in runs],
        "Attention": [_attention(run) for run in runs],
    }
    for mode in modes:
        scores = [run.contexts.get(mode, {}).get(metric) for run in runs]
        values[f"{TITLES[metric]}, {mode} context"] = [Cell.plain(score, "{:.2f}") for score in scores]
    values |= {title: [Cell.plain(run.search.get(key)) for run in runs] for title, key in _SEARCH.items()}
    rows = [Row(title, cells) for title, cells in values.items() if any(cell.text for cell in cells)]
    note = (
        "Captions per second: the median of what training logged, per process. Context: the expectation over "
        "locations (expected), the most probable one (argmax) or one drawn (sample)."
    )
    return [Table("Speed, size and decoding", names, rows, note)] * bool(rows) + [_settings_table(runs, names)]


def _attention(run: Run) -> Cell:
    settings = flat(run.settings)
    names = [settings.get(f"model.decoder.{key}") for key in ("attention", "attention.score", "output")]
    drew = ["drew no location in training"] if run.never_drew else []
    return Cell(attention_kind(run.settings), detail=", ".join([*filter(None, names), *drew]))


def settings_of(run: Run) -> dict[str, Any]:
    """Return a run's flat settings without the settings that make no variant."""
    return flat(run.settings, without=_NO_VARIANT)


def _settings_table(runs: Sequence[Run], names: list[str]) -> Table:
    """Return the settings that differ among the runs whose settings are known."""
    settings = {run.name: settings_of(run) for run in runs if run.settings}
    rows = []
    for key in sorted({key for of_run in settings.values() for key in of_run}):
        values = [of_run.get(key) for of_run in settings.values()]
        if any(value != values[0] for value in values):
            shown = [settings.get(run.name, {}).get(key, "") for run in runs]
            rows.append(Row(key, [Cell(str(v).lower() if v is None or isinstance(v, bool) else str(v)) for v in shown]))
    missing = [run.name for run in runs if run.name not in settings]
    note = f"The settings of {', '.join(missing)} are not known." if missing else ""
    return Table("Settings that differ", names, rows, note)
