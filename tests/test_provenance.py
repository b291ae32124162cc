from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from captioning.provenance import provenance


def test_a_repository_that_an_environment_lies_in_is_not_ours(tmp_path, monkeypatch):
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=b", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    installed = tmp_path / ".venv/captioning/provenance.py"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr("captioning.provenance.__file__", str(installed))
    origin = provenance(command="x", seed=None)
    assert origin["commit"] == "" and origin["uncommitted_changes"] is False


def test_a_measurement_says_command_commit_seed_machine_and_date():
    origin = provenance(command="make demo", seed=3)
    assert json.loads(json.dumps(origin)) == origin
    assert (origin["command"], origin["seed"]) == ("make demo", 3)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", origin["date"])
    assert origin["machine"]["cores"] >= 1 and origin["software"]["torch"]
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout.strip()
    assert origin["commit"] == head
