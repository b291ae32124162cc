"""The demo ends with the comparison of its runs; training them is in test_end_to_end.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers import load_script

from captioning.errors import InputError

ROOT = Path(__file__).resolve().parent.parent


def test_the_demo_ends_with_the_comparison_of_its_runs_and_prints_where_it_is(tested_pair, capsys):
    runs = tested_pair[0].parent
    page = load_script("demo").compare(runs, ["soft", "hard"])
    out = capsys.readouterr().out
    assert f"$ captioning compare {runs}/soft {runs}/hard --output {runs}/comparison.html" in out
    assert "hard scores BLEU-4" in out or "hard and soft have the same BLEU-4" in out
    assert "explorer-data" in page.read_text()


def test_the_summary_says_where_the_comparison_is_if_there_is_one(tmp_path, capsys):
    names = ("bleu1", "bleu2", "bleu3", "bleu4", "pointing_accuracy", "seconds")
    entry = dict.fromkeys(names, 1.0) | dict.fromkeys(("caption", "image", "overlay", "checkpoint"), "x")
    load_script("demo").report(tmp_path, {"soft": entry}, tmp_path / "comparison.html")
    assert f"{tmp_path}/comparison.html" in capsys.readouterr().out
    load_script("demo").report(tmp_path, {"soft": entry}, None)
    assert "comparison" not in capsys.readouterr().out


def test_the_readme_shows_the_captions_of_the_measured_demo():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    entry = json.loads((ROOT / "docs/measurements/demo.json").read_text())["soft"]
    assert load_script("demo").with_captions(readme, entry) == readme
    assert re.search(
        r"caption(?:_image\.py)? data/\S+ .*\n.*\n" + re.escape(list(entry["examples"].values())[1]), readme
    )


def test_captions_are_written_where_the_readme_shows_them():
    command = "$ captioning caption a.png \\\n  --model runs/demo/soft/x.ckpt\n"
    text = f"intro\n{command}old\nend\nsoft: old\n"
    entry = {"caption": "a dog", "examples": {"a.png": "two cats"}}
    found = load_script("demo").with_captions(text, entry)
    assert found == f"intro\n{command}two cats\nend\nsoft: a dog\n"
    with pytest.raises(InputError, match=r"a\.png is none of b\.png"):
        load_script("demo").with_captions(text, entry | {"examples": {"b.png": "x"}})
