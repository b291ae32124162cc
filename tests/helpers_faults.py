"""Faults and the line by which a command refuses each. ``python tests/helpers_faults.py`` writes them into the docs.

The table of docs/reliability.md is this one, which tests/test_faults_table.py checks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from captioning.errors import exits_on_input_error

MODULES = (
    *("test_faults_training", "test_kill_points", "test_faults_checkpoints", "test_faults_data"),
    *("test_faults_readers", "test_faults_options", "test_sent_folders", "test_budgets", "test_native"),
)
PAGE = Path(__file__).resolve().parent.parent / "docs/reliability.md"
BEGIN, END = "<!-- faults -->\n", "<!-- end of faults -->\n"


@dataclass(frozen=True)
class Fault:
    """What goes wrong, words of the one line that the user sees, the exit code, and what is kept."""

    what: str
    sees: str
    code: int = 2
    kept: str = "all there was"


def faults(cases: Mapping[Fault, Any]) -> pytest.MarkDecorator:
    """Parametrize a test with ``fault`` and ``case``."""
    return pytest.mark.parametrize(("fault", "case"), [pytest.param(f, v, id=f.what) for f, v in cases.items()])


def proves(fault: Fault) -> pytest.MarkDecorator:
    """Give a test its one ``fault``."""
    return pytest.mark.parametrize("fault", [pytest.param(fault, id="fault")])


def ends(capsys: pytest.CaptureFixture[str], fault: Fault, run: Callable[..., Any], *args: Any) -> str:
    """Run a command, check that it ends as the fault says with one line, and return that line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        exits_on_input_error(run)(*args)
    lines = capsys.readouterr().err.strip().splitlines()
    line = lines[-1] if lines else ""
    assert ended.value.code == fault.code, line
    assert line.startswith("error: ") and fault.sees in line, line
    assert not [other for other in lines[:-1] if other.startswith(("error: ", "Traceback", "usage:"))]
    return line


def rows() -> Iterator[Fault]:
    for name in MODULES:
        for function in vars(importlib.import_module(name)).values():
            for mark in getattr(function, "pytestmark", ()) if callable(function) else ():
                if mark.name == "parametrize" and "fault" in mark.args[0]:
                    yield from (value for param in mark.args[1] for value in param.values if isinstance(value, Fault))


def table() -> str:
    """Return the table of all faults in Markdown."""
    cells = [(row.what, row.sees or "-", str(row.code), row.kept) for row in dict.fromkeys(rows())]
    lines = [
        " | ".join(" ".join(cell.split()).replace("|", "\\|").replace("<", "&lt;") for cell in row) for row in cells
    ]
    head = ["fault | the line says | exit code | kept", "--- | --- | --- | ---"]
    return "".join(f"| {line} |\n" for line in [*head, *lines])


def table_of_the_page() -> str:
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    from helpers_faults import table as table_of_the_tests  # the tests know the class of that module, not of __main__

    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table_of_the_tests() + END + rest.partition(END)[2], encoding="utf-8")
