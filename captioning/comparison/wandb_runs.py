"""Runs by name: in a folder, in files that wandb wrote offline, or on the W&B server."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from captioning.comparison.runs import Curve, Run, WandbPlace, is_run_folder, merged, number, read_run
from captioning.errors import InputError, one_line
from captioning.files import read_json
from captioning.run_folder import RunFolder

_ADDRESS = re.compile(r"(?:https://[^/]+/)?([\w.-]+)/([\w.-]+)/(?:runs/)?([\w.-]+)/?")
_SWEEP = re.compile(r"(?:https://[^/]+/)?([\w.-]+)/([\w.-]+)/sweeps/([\w.-]+)/?")


def find_runs(name: str) -> list[Run]:
    """Read one run as ``find_run`` does, all runs in a folder, or the runs of a sweep online.

    Raises:
        InputError: There is no run, or one cannot be read.
    """
    path = Path(name)
    if path.is_dir() and not is_run_folder(path):
        inside = sorted(child for child in path.iterdir() if child.is_dir() and is_run_folder(child))
        if inside:
            return [find_run(str(child)) for child in inside]
    if not path.exists() and (sweep := _SWEEP.fullmatch(name)):
        return [_read_online(address, address) for address in _sweep_runs(*sweep.groups())]
    return [find_run(name)]


def _sweep_runs(entity: str, project: str, sweep: str) -> list[str]:
    """Return the addresses of a sweep's runs, by name."""
    import wandb

    try:
        runs = sorted(wandb.Api().sweep(f"{entity}/{project}/{sweep}").runs, key=lambda run: (run.name, run.id))
    except (wandb.Error, ValueError, OSError) as error:
        address = f"{entity}/{project}/sweeps/{sweep}"
        raise InputError(f"{address}: W&B returned no such sweep ({one_line(error)})") from error
    return [f"{entity}/{project}/{run.id}" for run in runs]


def find_run(name: str) -> Run:
    """Read a run from its folder, from what wandb wrote offline, or from its address online.

    Raises:
        InputError: There is no such run, or it cannot be read.
    """
    path = Path(name)
    if path.is_file() and path.suffix == ".wandb":
        return _read_offline([path], name)
    if path.is_dir():
        if files := sorted(path.glob("run-*.wandb")):
            return _read_offline(files, name)
        if path.name == "wandb" and (files := sorted(path.glob("*run-*/run-*.wandb"))):
            if len({file.stem for file in files}) > 1:
                raise InputError(f"{name}: holds several runs; give one of {', '.join(str(f.parent) for f in files)}")
            return _read_offline(files, name)
        run = read_run(path)
        _add_wandb(run, path)
        return run
    if (address := _ADDRESS.fullmatch(name)) and not Path(path.parts[0]).is_dir():
        return _read_online("/".join(address.groups()), name)
    raise InputError(f"{name}: no such folder; give a run's folder, or ENTITY/PROJECT/RUN_ID of a run online")


def _add_wandb(run: Run, folder: Path) -> None:
    """Add to a run its place in wandb, and its duration, which only wandb records."""
    note = _note(folder)
    files = sorted(folder.glob(f"wandb/*run-*/run-{note.get('id', '*')}.wandb"))
    if not note and len({file.stem for file in files}) != 1:
        return  # There is no log, or any of several may belong to this run.
    logs = []
    for file in files:
        with contextlib.suppress(InputError):  # of a process that was killed as it started
            logs.append(_read_log(file))
    if not note and not logs:
        return
    place = note or logs[-1].place
    offline = tuple(file.parent for file in files if file.parent.name.startswith("offline-run-"))
    run.wandb = WandbPlace(place.get("entity") or "", place["project"], place["id"], offline)
    run.seconds = sum(log.seconds for log in logs) or None


def _read_offline(files: list[Path], source: str) -> Run:
    """Read the files that wandb logged one run into; every resumption adds a file."""
    folder = files[-1].parent.parent.parent  # RUN/wandb/offline-run-x/run-x.wandb
    linked = files[-1].parent.parent.name == "wandb" and is_run_folder(folder)
    logs = [_read_log(file) for file in files]
    place = logs[-1].place
    run = read_run(folder) if linked else Run("", source)
    run.name, run.source = place["name"] or place["id"], source
    run.settings = run.settings or {name: value for log in logs for name, value in log.settings.items()}
    run.curves = _curves([entry for log in logs for entry in log.history])
    run.seconds = sum(log.seconds for log in logs) or None
    run.wandb = WandbPlace(place["entity"], place["project"], place["id"], tuple(file.parent for file in files))
    return run


class _Log(NamedTuple):
    """The content of one .wandb file: the run's address, its settings, its logged entries and its seconds."""

    place: dict[str, str]
    settings: dict[str, Any]
    history: list[dict[str, Any]]
    seconds: float


def _read_log(file: Path) -> _Log:
    """Read a .wandb file with wandb's own reader.

    Raises:
        InputError: The file is damaged.
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
    trained = [entry for entry in history if any(key.startswith(("train/", "val/")) for key in entry)]  # not tests
    seconds = max((float(entry.get("_runtime", 0)) for entry in trained), default=0.0)
    return _Log({name: run.get(field, "") for name, field in names.items()}, settings, history, seconds)


def _read_online(address: str, source: str) -> Run:
    """Read a run from the W&B server, and its captions from its folder if that is on this machine."""
    import wandb

    try:
        online = wandb.Api().run(address)
        entries = list(online.scan_history())
    except (wandb.Error, ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:160]
        raise InputError(f"{source}: no such folder here, and W&B returned no such run ({reason})") from error
    settings = {key: value for key, value in dict(online.config).items() if not key.startswith("_")}
    folder = Path((settings.get("trainer") or {}).get("default_root_dir") or "")
    run = Run(name=online.name or online.id, source=source)
    if is_run_folder(folder) and _is_of(folder, online.id):
        run = dataclasses.replace(read_run(folder), name=run.name, source=source)
    run.settings = settings
    run.curves = _curves(entries)
    run.seconds = number(dict(online.summary).get("_runtime"))
    run.wandb = WandbPlace(online.entity, online.project, online.id)
    return run


def _is_of(folder: Path, run_id: str) -> bool:
    """Return whether the folder belongs to this run, not to a run of the same name on another machine."""
    if note := _note(folder):
        return bool(note.get("id") == run_id)
    return any(folder.glob(f"wandb/*run-*/run-{run_id}.wandb"))


def _note(folder: Path) -> dict[str, Any]:
    """Return what training noted about the wandb run of a folder, {} if nothing.

    Raises:
        InputError: The note is damaged.
    """
    path = RunFolder(folder).wandb_run
    content = read_json(path) if path.is_file() else {}
    if content and not (isinstance(content, dict) and {"id", "project"} <= content.keys()):
        raise InputError(f"{path}: does not name a wandb run")
    return content or {}


def _curves(entries: Iterable[dict[str, Any]]) -> dict[str, Curve]:
    """Return the logged numbers by key: (optimizer step, value)."""
    curves: dict[str, Curve] = {}
    for entry in entries:
        step = number(entry.get("trainer/global_step"))
        if step is None:
            continue  # not of a training step
        for key, value in entry.items():
            if key != "trainer/global_step" and not key.startswith("_") and (finite := number(value)) is not None:
                curves.setdefault(key, []).append((int(step), finite))
    return {key: merged(points) for key, points in curves.items()}


def report_command(runs: Sequence[Run], command: str) -> str:
    """Return the command that uploads the runs and makes their report; "" if a run was not logged to wandb."""
    if not all(run.wandb for run in runs):
        return ""
    folders = [os.path.relpath(folder) for run in runs if run.wandb for folder in run.wandb.offline]
    upload = f"wandb sync {shlex.join(folders)} && " if folders else ""
    return f"{upload}{command} --report"
