"""The fuzzer, for a minute; that it finds what there is to find; and memory over a long time."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import fuzz_tools
import pytest
from fuzz import COUNTS, TARGETS, fuzz, prepare
from fuzz_targets import Target
from helpers_fuzz import damage

from captioning.errors import InputError
from captioning.files import read_json

TESTS = Path(__file__).parent


def test_an_input_depends_on_its_number_and_the_seed_alone():
    content = json.dumps({"a": [1, {"b": "x"}], "c": None}).encode()
    made = [damage("x.json", content, random.Random(f"1/x/{number}")) for number in range(200)]
    assert made == [damage("x.json", content, random.Random(f"1/x/{number}")) for number in range(200)]
    assert len(set(made)) > 150


def test_the_fuzzer_tells_a_fault_from_a_refusal(tmp_path, capsys, monkeypatch):
    """A reader that is not careful is caught, one that is careful is not."""
    monkeypatch.chdir(tmp_path)
    files = {"x.json": b'{"a": {"b": 1}}'}

    def careless(folder, draw):
        try:
            content = json.loads((folder / "x.json").read_bytes())
        except ValueError as error:
            raise InputError("no JSON") from error
        return content["a"]["b"]

    def careful(folder, draw):
        content = read_json(folder / "x.json")
        if not isinstance(content, dict) or "a" not in content:
            raise InputError("no a")

    def deadly(folder, draw):
        if draw.random() < 0.1:
            os.kill(os.getpid(), signal.SIGSEGV)

    runs = {"careless": careless, "careful": careful, "deadly": deadly}
    targets = {name: Target(files, ["x.json"], run) for name, run in runs.items()}
    board = fuzz(targets, seed=1, cases=300, folder=tmp_path)
    tallies = {name: dict(zip(COUNTS, map(int, tally), strict=True)) for name, tally in board.tallies.items()}
    assert board.total("inputs") == board.case == 300
    assert tallies["careless"]["faults"] > 5 and tallies["careful"]["faults"] == 0
    assert 2 < tallies["deadly"]["faults"] < 30, "the worker's death is a fault, and the next one goes on"
    assert all(0 < tallies[name]["refused"] < tallies[name]["inputs"] for name in ("careless", "careful"))


def test_what_hangs_is_a_fault(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fuzz.SECONDS_EACH", 0.2)

    def waits(folder, draw):
        signal.setitimer(signal.ITIMER_REAL, 0)  # as code that no timer reaches
        time.sleep(60)

    board = fuzz({"waits": Target({"x": b""}, [], waits)}, seed=1, cases=1, folder=tmp_path)
    assert board.total("faults") == 1 and "hung beyond all timers" in capfd.readouterr().out


@pytest.mark.filterwarnings("ignore")  # as in the fuzzer
@pytest.mark.parametrize("name", [tool.__name__ for tool in fuzz_tools.TOOLS])
def test_the_tools_work_when_nothing_is_damaged(tmp_path, monkeypatch, name):
    """Else the fuzzer would see nothing but their first refusal."""
    monkeypatch.setattr(fuzz_tools, "changed", lambda line, draw: line)
    monkeypatch.setattr(fuzz_tools, "damaged_head", lambda size, draw: ("200 OK", {"Content-Length": str(size)}))
    target, folder = TARGETS[name](tmp_path / "made"), tmp_path / "folder"
    lines = {"tools": list(fuzz_tools.LINES), "scoring": fuzz_tools.SCORINGS}
    lines |= {"preparation": fuzz_tools.PREPARATIONS, "extraction": fuzz_tools.EXTRACTIONS}
    for line in lines[name]:
        prepare(target, folder)
        monkeypatch.chdir(folder)
        target.run(folder, mock.Mock(choice=lambda given, line=line: line))


QUICK = ("readers", "runs", "environment", "lines")


def test_a_few_hundred_cases_of_a_fixed_seed_find_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    targets = {name: TARGETS[name](tmp_path / "made" / name) for name in QUICK}
    assert fuzz(targets, seed=31, cases=600, folder=tmp_path).total("faults") == 0


@pytest.mark.slow
def test_a_minute_of_fuzzing_finds_nothing(tmp_path):
    """A fault is printed with the command that makes it again."""
    counts = tmp_path / "counts.json"
    command = [sys.executable, str(TESTS / "fuzz.py"), "--seconds", "60", "--json", str(counts)]
    assert subprocess.run(command, check=False).returncode == 0
    targets = json.loads(counts.read_text())["targets"]
    assert targets.keys() == TARGETS.keys()
    often = [target for target in targets.values() if target["inputs"] >= 50]
    assert often and all(0 < target["refused"] < target["inputs"] for target in often), targets


@pytest.mark.slow
def test_memory_does_not_grow_over_ten_thousand_captions_and_fifty_epochs():
    assert subprocess.run([sys.executable, str(TESTS / "soak.py")], check=False).returncode == 0
