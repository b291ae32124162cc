#!/usr/bin/env python
"""Compare training runs: scores on the same images with their uncertainty, curves, speed, settings, attention.

A RUN is a run's folder (runs/NAME), a folder that wandb wrote offline (.../wandb/offline-run-*), or the address of a
run online (ENTITY/PROJECT/RUN_ID). The first is what the others are compared with. Prints tables and writes a page
that opens from disk in any browser. Scores need the captions that `captioning test` leaves in a run's folder.

examples:
  python scripts/compare_runs.py runs/shapes_soft runs/shapes_hard
  python scripts/compare_runs.py runs/a runs/b runs/c --metric bleu1 --images 40 --output compared.html
  python scripts/compare_runs.py me/captioning/7426p8xi me/captioning/sxg5h2sh --report
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from captioning.errors import InputError, exits_on_input_error
from captioning.terminal import script_parser

if TYPE_CHECKING:
    from captioning.comparison.result import Cell, Comparison, Table
    from captioning.comparison.runs import Curve, Run

ADDRESS = re.compile(r"(?:https://[^/]+/)?([\w.-]+)/([\w.-]+)/(?:runs/)?([\w.-]+)/?")


@exits_on_input_error
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(argv)
    if len(args.runs) < 2:
        raise InputError(f"give two or more runs to compare, got {' '.join(args.runs)}")
    if args.report:
        from captioning.comparison.wandb_report import build_report  # noqa: F401 - fail before the work, not after

    from captioning.comparison.compare import compare
    from captioning.comparison.page import comparison_page
    from captioning.comparison.recaption import explore, load_models
    from captioning.files import write_json
    from captioning.provenance import provenance

    runs = [read(name) for name in args.runs]
    name_apart(runs)
    models, troubles = load_models(runs)
    comparison = compare(runs, metric=args.metric, resamples=args.samples, seed=args.seed, images=args.images)
    explorer, more = explore(runs, models, comparison, seed=args.seed)
    comparison.notices += troubles + more
    show(comparison)

    command = f"python scripts/compare_runs.py {shlex.join(argv)}"
    origin = provenance(command=command, seed=args.seed)
    version = (origin["commit"] or "unknown") + ", changed since" * origin["uncommitted_changes"]
    footer = [command, f"Version {version}; {origin['date']}; {args.samples} resamples from seed {args.seed}."]
    page = comparison_page(comparison, explorer=explorer, footer=footer)
    output = Path(args.output) if args.output else common_folder(runs) / "comparison.html"
    _write(output, page)
    print(f"\npage          {output}")
    if args.json:
        write_json(Path(args.json), comparison.to_dict() | {"provenance": origin})
        print(f"numbers       {args.json}")
    if args.report:
        print(f"W&B report    {publish(runs, comparison, output)}")
    elif command_line := report_command(runs, command):
        print(f"W&B report    {command_line}")


def _parser() -> argparse.ArgumentParser:
    parser = script_parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, an offline wandb folder, or an address")
    parser.add_argument(
        "--metric",
        choices=("bleu1", "bleu2", "bleu3", "bleu4"),
        default="bleu4",
        help="what the verdict and the ranking of images are about (default: %(default)s)",
    )
    parser.add_argument(
        "--images", type=_at_least(0), default=12, help="images to show where the runs differ (default: %(default)s)"
    )
    parser.add_argument(
        "--samples", type=_at_least(1), default=1000, help="resamples for intervals and tests (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the resampling (default: %(default)s)")
    parser.add_argument("--output", metavar="FILE.html", help="(default: comparison.html beside the runs)")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers")
    parser.add_argument("--report", action="store_true", help="also make a W&B report; the runs must be online")
    return parser


def _at_least(minimum: int) -> Any:
    def number(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {minimum}, got {text!r}")
        return int(text)

    return number


# Reading runs


def read(name: str) -> Run:
    """Return the run that a word of the command line means.

    Raises:
        InputError: there is no such run, or it cannot be read.
    """
    from captioning.comparison.runs import read_run

    path = Path(name)
    if path.is_file() and path.suffix == ".wandb":
        return read_offline([path], name)
    if path.is_dir():
        if files := sorted(path.glob("run-*.wandb")):
            return read_offline(files, name)
        if path.name == "wandb" and (files := sorted(path.glob("*run-*/run-*.wandb"))):
            if len({file.stem for file in files}) > 1:
                raise InputError(f"{name}: holds several runs; give one of {', '.join(str(f.parent) for f in files)}")
            return read_offline(files, name)
        run = read_run(path)
        add_wandb(run, path)
        return run
    if address := ADDRESS.fullmatch(name):
        return read_online("/".join(address.groups()), name)
    raise InputError(f"{name}: no such folder; give a run's folder, or ENTITY/PROJECT/RUN_ID of a run online")


def add_wandb(run: Run, folder: Path) -> None:
    """Add to a run read from its folder where wandb has it, and how long it took, which only wandb noted."""
    from captioning.comparison.runs import WandbPlace

    note = folder / "wandb_run.json"
    known = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else {}
    files = sorted(folder.glob(f"wandb/*run-*/run-{known.get('id', '*')}.wandb"))
    if not known and len({file.stem for file in files}) != 1:
        return  # which of them it is, nobody knows
    parts = [read_log(file) for file in files]
    place = known or parts[-1].place
    offline = tuple(file.parent for file in files if file.parent.name.startswith("offline-run-"))
    run.wandb = WandbPlace(place.get("entity") or "", place["project"], place["id"], offline)
    run.seconds = sum(part.seconds for part in parts) or None


def read_offline(files: list[Path], source: str) -> Run:
    """Read what wandb logged into the files of one run, which has several where it was resumed."""
    from captioning.comparison.runs import Run, WandbPlace, is_run_folder, read_run

    folder = files[-1].parent.parent.parent  # RUN/wandb/offline-run-x/run-x.wandb
    linked = files[-1].parent.parent.name == "wandb" and is_run_folder(folder)
    parts = [read_log(file) for file in files]
    place = parts[-1].place
    run = read_run(folder) if linked else Run("", source)
    run.name, run.source = place["name"] or place["id"], source
    run.settings = run.settings or parts[-1].settings
    run.curves = curves([row for part in parts for row in part.history])
    run.seconds = sum(part.seconds for part in parts) or None
    run.wandb = WandbPlace(place["entity"], place["project"], place["id"], tuple(file.parent for file in files))
    return run


class WandbLog(NamedTuple):
    """What stands in one .wandb file: where the run belongs, its settings, what was logged, and how long it took."""

    place: dict[str, str]
    settings: dict[str, Any]
    history: list[dict[str, Any]]
    seconds: float


def read_log(file: Path) -> WandbLog:
    """Read a .wandb file with wandb's own reader.

    Raises:
        InputError: it is damaged.
    """
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    records = [json.loads(line) for line in done.stdout.splitlines()] if not done.returncode else []
    run = next((record["run"] for record in records if record["type"] == "run"), None)
    if run is None:
        reason = " ".join((done.stderr or done.stdout).split())[-160:]
        raise InputError(f"{file}: wandb cannot read it ({reason or 'there is no run in it'})")
    names = {"name": "display_name", "id": "run_id", "project": "project", "entity": "entity"}
    settings: dict[str, Any] = dict(run.get("config", {}).get("update", {}))
    for record in records:
        if record["type"] == "config":
            settings |= record["config"].get("update", {})
    settings.pop("_wandb", None)
    history = [record["history"]["item"] for record in records if record["type"] == "history"]
    seconds = max((float(row.get("_runtime", 0)) for row in history), default=0.0)
    return WandbLog({name: run.get(field, "") for name, field in names.items()}, settings, history, seconds)


def read_online(address: str, source: str) -> Run:
    """Read a run from the W&B server; its captions, from the run's folder if that is on this machine."""
    import wandb

    from captioning.comparison.runs import Run, WandbPlace, is_run_folder, number, read_run

    try:
        online = wandb.Api().run(address)
        rows = list(online.scan_history())
    except (wandb.Error, ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:160]
        raise InputError(f"{source}: no such folder here, and no run that W&B would give ({reason})") from error
    settings = {key: value for key, value in dict(online.config).items() if not key.startswith("_")}
    folder = Path((settings.get("trainer") or {}).get("default_root_dir") or "")
    run = Run(name=online.name, source=source)
    if is_run_folder(folder) and _is_of(folder, online.id):
        run = dataclasses.replace(read_run(folder), name=online.name, source=source)
    run.settings = settings
    run.curves = curves(rows)
    run.seconds = number(dict(online.summary).get("_runtime"))
    run.wandb = WandbPlace(online.entity, online.project, online.id)
    return run


def _is_of(folder: Path, run_id: str) -> bool:
    """Whether the folder is the run's, not another's that had the same name on another machine."""
    note = folder / "wandb_run.json"
    if note.is_file():
        return bool(json.loads(note.read_text(encoding="utf-8")).get("id") == run_id)
    return any(folder.glob(f"wandb/*run-*/run-{run_id}.wandb"))


def curves(rows: Iterable[dict[str, Any]]) -> dict[str, Curve]:
    """Return by key (optimizer step, value) of what wandb logged, numbers alone."""
    from captioning.comparison.runs import merged, number

    found: dict[str, Curve] = {}
    for row in rows:
        step = number(row.get("trainer/global_step"))
        if step is None:
            continue  # no training step, such as the table of a finished run
        for key, value in row.items():
            if key != "trainer/global_step" and not key.startswith("_") and (known := number(value)) is not None:
                found.setdefault(key, []).append((int(step), known))
    return {key: merged(points) for key, points in found.items()}


def name_apart(runs: list[Run]) -> None:
    """Give runs of one name the folder above it too, and a number where that does not tell them apart either."""
    for longer in (True, False):
        taken: dict[str, list[Run]] = {}
        for run in runs:
            taken.setdefault(run.name, []).append(run)
        for name, alike in taken.items():
            for count, run in enumerate(alike, 1):
                if len(alike) > 1 and longer and run.folder is not None:
                    run.name = f"{run.folder.resolve().parent.name}/{name}"
                elif len(alike) > 1 and not longer:
                    run.name = f"{name} ({count})"


def common_folder(runs: list[Run]) -> Path:
    """The folder that all runs' folders lie in; this one if none of them is here."""
    parents = [run.folder.resolve().parent for run in runs if run.folder is not None]
    return Path(os.path.relpath(os.path.commonpath(parents))) if parents else Path()


# Showing


def show(comparison: Comparison) -> None:
    """Print the comparison as tables."""
    from rich.console import Console
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 40 + 44 * len(comparison.runs), highlight=False)
    for line in comparison.verdicts.values():
        console.print(Text(f"\n{line}", style="bold"))
    for line in comparison.notices:
        console.print(Text(f"note: {line}"), soft_wrap=True)
    for table in [*comparison.tables, comparison.settings]:
        if table.rows:
            console.print()
            console.print(_rich(table, comparison.runs))
            if table.note:
                console.print(Text(table.note, style="dim"))


def _rich(table: Table, runs: list[str]) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    drawn.add_column("", overflow="fold")
    for name in runs:
        drawn.add_column(Text(name), overflow="fold")

    def content(cell: Cell) -> Text:
        text = Text(cell.text or "-", style="bold" if cell.best else "")
        if cell.detail:
            text.append(f"  {cell.detail}", style="dim not bold")
        if cell.change:
            text.append(f"\n{cell.change}", style="not bold" if cell.clear else "dim not bold")
        return text

    for row in table.rows:
        drawn.add_row(Text(("  " if row.baseline else "") + row.name), *(content(cell) for cell in row.cells))
    return drawn


def _write(path: Path, page: str) -> None:
    temporary = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"--output {path}: cannot be written ({error.strerror})") from error


# W&B report


def report_command(runs: list[Run], command: str) -> str:
    """Return the command that makes the report; "" where no run was logged to wandb."""
    if not all(run.wandb for run in runs):
        return ""
    folders = [os.path.relpath(folder) for run in runs if run.wandb for folder in run.wandb.offline]
    upload = f"wandb sync {shlex.join(folders)} && " if folders else ""
    return f"{upload}{command} --report"


def publish(runs: list[Run], comparison: Comparison, page: Path) -> str:
    """Log the page to wandb, make the report and return its address."""
    import wandb

    from captioning.comparison.wandb_report import PAGE_KEY, Address, build_report

    places = {run.name: run.wandb for run in runs if run.wandb}
    if not places:
        raise InputError("--report: none of the runs was logged to wandb; train with its logger, see configs/")
    project = next(iter(places.values())).project
    try:
        mine = wandb.Api().default_entity
        title = " · ".join(comparison.runs)
        with wandb.init(entity=mine, project=project, job_type="comparison", name=title, mode="online") as run:
            run.log({PAGE_KEY: wandb.Html(page.read_text(encoding="utf-8"))})
            logged = Address(run.entity, run.project, run.id)
        addresses = {name: Address(place.entity or mine, place.project, place.run_id) for name, place in places.items()}
        report = build_report(comparison, addresses, logged)
        report.save()
    except (wandb.Error, ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"--report: W&B did not take it ({reason}); is `wandb login` done?") from error
    return str(report.url)


if __name__ == "__main__":
    main()
