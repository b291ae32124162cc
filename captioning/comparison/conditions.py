"""How runs were made: validation scores in training, speed, size, decoding, settings and curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from captioning.comparison.formats import duration, plain_cell
from captioning.comparison.result import Cell, Comparison, Row, Table
from captioning.comparison.runs import SUMMED, Curve, Run, flat, is_summed

_LOWER_IS_BETTER = ("nll", "loss")
_SEARCH = {
    "Split of the test": "split",
    "Checkpoint of the test": "checkpoint",
    "Context in the test": "inference",
    "Tokenizer, if not English": "tokenizer",
    "Beam size in the test": "beam_size",
}
# Settings that make no variant: where a run is stored, what it is tested on (a row of its own), and the settings that
# its wandb config repeats under short names.
_ELSEWHERE = (
    "data.test_split data.feature_shares "
    "name runs results config ckpt_path trainer.default_root_dir trainer.logger checkpoint.dirpath last.dirpath "
    "_wandb attention score encoder seed provenance parameters splits"
).split()


def add_training(result: Comparison, runs: Sequence[Run]) -> None:
    rows = []
    for key in (f"val/{result.metric}", "val/nll", "val/pointing_accuracy", "val/attention_correctness"):
        curves = [run.curves.get(key, []) for run in runs]
        if not any(curves):
            continue
        choose = min if key.endswith(_LOWER_IS_BETTER) else max
        best = [choose(curve, key=lambda point: point[1]) if curve else None for curve in curves]
        final = [curve[-1] if curve else None for curve in curves]
        named = {f"{key} best and final": best} if best == final else {f"{key} best": best, f"{key} final": final}
        for name, points in named.items():
            cells = [
                Cell("") if point is None else Cell(f"{point[1]:.2f}", detail=f"step {point[0]:,}", value=point[1])
                for point in points
            ]
            rows.append(Row(name, cells))
    if rows:
        result.tables.append(Table("Validation", rows, "In training, at the optimizer step beside the score."))


def add_conditions(result: Comparison, runs: Sequence[Run]) -> None:
    rows = [
        Row("Training, captions per second", [plain_cell(run.captions_per_second, "{:,.0f}") for run in runs]),
        Row("Training, time", [duration(run.seconds) for run in runs]),
        *(
            Row(f"Parameters, {name}", [plain_cell((run.parameters or {}).get(name), "{:,.0f}") for run in runs])
            for name in ("decoder", "encoder")
        ),
        Row("Attention", [_attention(run) for run in runs]),
        *(Row(title, [plain_cell(run.search.get(key), "{}") for run in runs]) for title, key in _SEARCH.items()),
    ]
    rows = [row for row in rows if any(cell.text for cell in row.cells)]
    if rows:
        note = (
            "Captions per second: the median of what training logged, per process. Context: the expectation over "
            "locations (expected), the most probable one (argmax) or one drawn (sample)."
        )
        result.tables.append(Table("Speed, size and decoding", rows, note))


def _attention(run: Run) -> Cell:
    settings = flat(run.settings)
    names = [settings.get(f"model.decoder.{key}") for key in ("attention", "attention.score", "output")]
    known = [str(name) for name in names if name]
    kind = [SUMMED] if is_summed(run) else known[:1]
    return Cell("".join(kind), detail=", ".join(name for name in known if name not in kind))


def settings_of(run: Run) -> dict[str, Any]:
    """Return a run's settings, flat, without those that make no variant."""
    return {
        key: value
        for key, value in flat(run.settings).items()
        if not any(key == name or key.startswith(f"{name}.") for name in _ELSEWHERE)
    }


def settings_table(runs: Sequence[Run]) -> Table:
    """Return the settings that differ among the runs whose settings are known."""
    settings = {run.name: settings_of(run) for run in runs if run.settings}
    rows = []
    for key in sorted({key for of_run in settings.values() for key in of_run}):
        values = [of_run.get(key) for of_run in settings.values()]
        if any(value != values[0] for value in values):
            rows.append(Row(key, [Cell(_shown(settings.get(run.name, {}).get(key, ""))) for run in runs]))
    missing = [run.name for run in runs if run.name not in settings]
    note = f"The settings of {', '.join(missing)} are not known." if missing else ""
    return Table("Settings that differ", rows, note)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def ordered_curves(runs: Sequence[Run], metric: str) -> dict[str, dict[str, Curve]]:
    """Return the curves of the runs by log key, the validation metrics first."""
    leading = [f"val/{metric}", "val/nll", "val/pointing_accuracy", "val/attention_correctness", "train/loss"]
    keys = sorted({key for run in runs for key in run.curves if "/" in key and not key.endswith("_no_penalty")})
    ordered = [key for key in leading if key in keys] + [key for key in keys if key not in leading]
    curves = {key: {run.name: run.curves[key] for run in runs if run.curves.get(key)} for key in ordered}
    return {key: of_runs for key, of_runs in curves.items() if of_runs}
