"""Tables of the conditions of runs (speed, size, decoding and settings), and the order of their curves."""

from collections.abc import Sequence

from captioning.comparison.result import Row, Table, TableCell
from captioning.comparison.runs import Curve, Run
from captioning.comparison.variants import compared_settings
from captioning.metrics.table import TITLES
from captioning.settings import attention_kind, flatten

_CONDITIONS = {
    "Split of the test": "split",
    "Checkpoint of the test": "checkpoint",
    "Context in the test": "context_mode",
    "Tokenizer, if not English": "tokenizer",
    "Beam size in the test": "beam_size",
}


def ordered_curves(runs: Sequence[Run], metric: str) -> dict[str, dict[str, Curve]]:
    """Return the curves by log key and run, the most important keys first, without controls."""
    first_keys = [f"val/{metric}", "val/nll", "val/pointing_accuracy", "val/attention_correctness", "train/loss"]
    keys = sorted({key for run in runs for key in run.curves if "/" in key and "_controls/" not in key})
    keys.sort(key=[*first_keys, *keys].index)
    return {key: {run.name: run.curves[key] for run in runs if run.curves.get(key)} for key in keys}


def condition_tables(runs: Sequence[Run], metric: str) -> list[Table]:
    """Return the table of speed, size and decoding, unless it is empty, and the table of settings that differ."""
    names = [run.name for run in runs]
    cells = {
        "Training, captions per second": [TableCell.plain(run.captions_per_second, "{:,.0f}") for run in runs],
        "Parameters, decoder": [TableCell.plain(run.parameters.get("decoder"), "{:,.0f}") for run in runs],
        "Parameters, encoder": [TableCell.plain(run.parameters.get("encoder"), "{:,.0f}") for run in runs],
        "Attention": [_attention_cell(run) for run in runs],
    }
    for mode in sorted({mode for run in runs for mode in run.metrics_by_context}):
        values = [run.metrics_by_context.get(mode, {}).get(metric) for run in runs]
        cells[f"{TITLES[metric]}, {mode} context"] = [TableCell.plain(value, "{:.2f}") for value in values]
    cells |= {title: [TableCell.plain(run.conditions.get(key)) for run in runs] for title, key in _CONDITIONS.items()}
    rows = [Row(title, row_cells) for title, row_cells in cells.items() if any(cell.text for cell in row_cells)]
    note = (
        "Captions per second: the median of what training logged, per process. Context: the expectation over "
        "locations (expected), the most probable location (argmax) or a drawn location (sample)."
    )
    tables = [Table("Speed, size and decoding", names, rows, note)] if rows else []
    return [*tables, _settings_table(runs, names)]


def _attention_cell(run: Run) -> TableCell:
    settings = flatten(run.settings)
    names = [settings.get(f"model.decoder.{key}") for key in ("attention", "attention.score", "output")]
    return TableCell(attention_kind(run.settings), detail=", ".join(filter(None, names)))


def _settings_table(runs: Sequence[Run], names: list[str]) -> Table:
    """Return the settings that differ among the runs whose settings are known."""
    settings = {run.name: compared_settings(run) for run in runs if run.settings}
    rows = []
    for key in sorted({key for run_settings in settings.values() for key in run_settings}):
        values = [run_settings.get(key) for run_settings in settings.values()]
        if any(value != values[0] for value in values):
            cells = [settings.get(run.name, {}).get(key, "") for run in runs]
            rows.append(Row(key, [TableCell(str(v).lower() if v in (None, True, False) else str(v)) for v in cells]))
    missing = [run.name for run in runs if run.name not in settings]
    note = f"The settings of {', '.join(missing)} are not known." if missing else ""
    return Table("Settings that differ", names, rows, note)
