import json
import re
import subprocess
from pathlib import Path

from captioning.provenance import provenance


def test_provenance_has_command_commit_seed_machine_and_date():
    origin = provenance(command="make demo", seed=3)
    assert json.loads(json.dumps(origin)) == origin
    assert (origin["command"], origin["seed"]) == ("make demo", 3)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", origin["date"])
    assert origin["machine"]["cores"] >= 1 and origin["software"]["torch"]
    words = ["git", "rev-parse", "--short", "HEAD"]
    head = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    assert origin["commit"] == head
