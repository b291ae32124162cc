"""How runs were made: speed, size, decoding, settings and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from captioning.comparison.result import Cell, Comparison, Row, Table
from captioning.comparison.runs import Run
from captioning.metrics.table import TITLES
from captioning.run_folder import LOCATION_SETTINGS, flat

_SEARCH = {
    "Split of the test": "split",
    "Checkpoint of the test": "checkpoint",
    "Context in the test": "inference",
    "Tokenizer, if not English": "tokenizer",
    "Beam size in the test": "beam_size",
}
# Settings that make no variant: storage and logging, the tested split (a row of its own), leftovers of old versions.
_ELSEWHERE = (*LOCATION_SETTINGS, "data.test_split", "data.feature_shares")


def add_conditions(result: Comparison, runs: Sequence[Run]) -> None:
    """Add the curves, the table of speed, size and decoding, and the table of settings that differ."""
    leading = [f"val/{result.metric}", "val/nll", "val/pointing_accuracy", "val/attention_correctness"]
    keys = sorted({key for run in runs for key in run.curves if "/" in key and "_controls/" not in key})
    ordered = sorted(keys, key=[*leading, "train/loss", *keys].index)
    result.curves = {key: {run.name: run.curves[key] for run in runs if run.curves.get(key)} for key in ordered}
    contexts = [run.contexts for run in runs]
    rows = [
        Row("Training, captions per second", [Cell.plain(run.captions_per_second, "{:,.0f}") for run in runs]),
        Row("Parameters, decoder", [Cell.plain(run.parameters.get("decoder"), "{:,.0f}") for run in runs]),
        Row("Parameters, encoder", [Cell.plain(run.parameters.get("encoder"), "{:,.0f}") for run in runs]),
        Row("Attention", [_attention(run) for run in runs]),
        *(
            Row(
                f"{TITLES[result.metric]}, {mode} context",
                [Cell.plain(of.get(mode, {}).get(result.metric), "{:.2f}") for of in contexts],
            )
            for mode in sorted({mode for of in contexts for mode in of})
        ),
        *(Row(title, [Cell.plain(run.search.get(key)) for run in runs]) for title, key in _SEARCH.items()),
    ]
    if rows := [row for row in rows if any(cell.text for cell in row.cells)]:
        note = (
            "Captions per second: the median of what training logged, per process. Context: the expectation over "
            "locations (expected), the most probable one (argmax) or one drawn (sample)."
        )
        result.tables.append(Table("Speed, size and decoding", rows, note))
    result.tables.append(_settings_table(runs))


def _attention(run: Run) -> Cell:
    settings = flat(run.settings)
    names = [settings.get(f"model.decoder.{key}") for key in ("attention", "attention.score", "output")]
    drew = ["drew no location in training"] if run.never_drew else []
    return Cell(attention_kind(run.settings), detail=", ".join([*filter(None, names), *drew]))


def attention_kind(settings: Mapping[str, Any]) -> str:
    """Return one word for the attention of a configuration: soft, hard, summed, multihead ..; "" if it names none."""
    names = flat(settings)
    if names.get("model.decoder.output") == "SummedOutput":
        return "summed"
    return str(names.get("model.decoder.attention") or "").rpartition(".")[2].removesuffix("Attention").lower()


def settings_of(run: Run) -> dict[str, Any]:
    """Return a run's flat settings without the settings that make no variant."""
    return flat(run.settings, without=_ELSEWHERE)


def _settings_table(runs: Sequence[Run]) -> Table:
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
    return Table("Settings that differ", rows, note)
