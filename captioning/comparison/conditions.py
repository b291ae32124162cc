"""How runs were made: validation scores in training, speed, size, decoding, settings and curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from captioning.comparison.formats import duration, plain_cell, with_best
from captioning.comparison.result import Cell, Comparison, Row, Table
from captioning.comparison.runs import Curve, Run, flat

_LOWER_IS_BETTER = ("nll", "loss")
# Settings of where a run is stored and read, of what it is tested on, which is compared by itself, and those that its
# wandb config repeats under short names.
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
        for which, points in (("best", best), ("final", final)):
            cells = [
                Cell("") if point is None else Cell(f"{point[1]:.2f}", detail=f"step {point[0]:,}", value=point[1])
                for point in points
            ]
            rows.append(Row(f"{key} {which}", with_best(cells, choose)))
    if rows:
        result.tables.append(Table("Validation", rows, "In training, after the optimizer step that is named."))


def add_conditions(result: Comparison, runs: Sequence[Run]) -> None:
    speeds = [plain_cell(run.captions_per_second, "{:,.0f}") for run in runs]
    rows = [
        Row("Training, captions per second", with_best(speeds, max)),
        Row("Training, time", [duration(run.seconds) for run in runs]),
        *(
            Row(f"Parameters, {part}", [plain_cell(_part(run, part), "{:,.0f}") for run in runs])
            for part in ("decoder", "encoder")
        ),
        Row("Attention", [_attention(run) for run in runs]),
        Row("Split of the test", [plain_cell(run.search.get("split"), "{}") for run in runs]),
        Row("Checkpoint of the test", [plain_cell(run.search.get("checkpoint"), "{}") for run in runs]),
        Row("Context in the test", [plain_cell(run.search.get("inference"), "{}") for run in runs]),
        Row(
            "Tokenizer, if not English",
            [plain_cell(run.search.get("tokenizer"), "{}") for run in runs],
        ),
        Row("Beam size in the test", [plain_cell(run.search.get("beam_size"), "{}") for run in runs]),
    ]
    rows = [row for row in rows if any(cell.text for cell in row.cells)]
    if rows:
        note = (
            "Captions per second: the median of what training logged, per process. Context: the expectation over "
            "locations (expected), the most probable one (argmax) or one drawn (sample)."
        )
        result.tables.append(Table("Speed, size and decoding", rows, note))


def _part(run: Run, part: str) -> int | None:
    return run.parameters.get(part) if run.parameters else None


def _attention(run: Run) -> Cell:
    settings = flat(run.settings)
    attention, *parts = (settings.get(f"model.decoder.{part}") for part in ("attention", "attention.score", "output"))
    return Cell(str(attention or ""), detail=", ".join(str(part) for part in parts if part))


def settings_of(run: Run) -> dict[str, Any]:
    """Return a run's settings, flat, without those of where it is stored."""
    return {
        key: value
        for key, value in flat(run.settings).items()
        if not any(key == other or key.startswith(f"{other}.") for other in _ELSEWHERE)
    }


def settings_table(runs: Sequence[Run]) -> Table:
    """The settings that differ among the runs whose settings are known."""
    known = {run.name: settings_of(run) for run in runs if run.settings}
    rows = []
    for key in sorted({key for settings in known.values() for key in settings}):
        values = [settings.get(key) for settings in known.values()]
        if any(value != values[0] for value in values):
            cells = [Cell(_shown(known.get(run.name, {}).get(key, ""))) for run in runs]
            rows.append(Row(key, cells))
    missing = [run.name for run in runs if run.name not in known]
    note = f"The settings of {', '.join(missing)} are not known." if missing else ""
    return Table("Settings that differ", rows, note)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def ordered_curves(runs: Sequence[Run], metric: str) -> dict[str, dict[str, Curve]]:
    """By log key, the validation metrics first."""
    leading = [f"val/{metric}", "val/nll", "val/pointing_accuracy", "val/attention_correctness", "train/loss"]
    keys = sorted({key for run in runs for key in run.curves if "/" in key and not key.endswith("_no_penalty")})
    ordered = [key for key in leading if key in keys] + [key for key in keys if key not in leading]
    found = {key: {run.name: run.curves[key] for run in runs if run.curves.get(key)} for key in ordered}
    return {key: curves for key, curves in found.items() if curves}
