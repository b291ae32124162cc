"""The fuzzer, for a minute; that it finds what there is to find; and memory over a long time."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import fuzz
from fuzz_targets import TARGETS, Target
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

    targets = {name: Target(files, ["x.json"], run) for name, run in (("careless", careless), ("careful", careful))}
    tallies = fuzz(targets, seed=1, seconds=60, inputs=150, first=0, folder=tmp_path)
    assert tallies["careless"].faults > 10 and tallies["careful"].faults == 0
    assert all(0 < tally.refused < tally.inputs == 150 for tally in tallies.values())


@pytest.mark.slow
def test_a_minute_of_fuzzing_finds_nothing(tmp_path):
    """A fault is printed with the command that makes it again."""
    counts = tmp_path / "counts.json"
    command = [sys.executable, str(TESTS / "fuzz.py"), "--seconds", "60", "--measurement", str(counts)]
    assert subprocess.run(command, check=False).returncode == 0
    found = json.loads(counts.read_text())["targets"]
    assert found.keys() == TARGETS.keys()
    often = [target for target in found.values() if target["inputs"] >= 20]
    assert often and all(0 < target["refused"] < target["inputs"] for target in often), found


@pytest.mark.slow
def test_memory_does_not_grow_over_ten_thousand_captions_and_fifty_epochs():
    assert subprocess.run([sys.executable, str(TESTS / "soak.py")], check=False).returncode == 0
