"""Faults and the line by which a command refuses each. ``python tests/helpers_faults.py`` prints all of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from captioning.errors import exits_on_input_error

MODULES = (
    *("test_faults_training", "test_kill_points", "test_faults_checkpoints", "test_faults_data"),
    *("test_faults_readers", "test_faults_options"),
)


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


if __name__ == "__main__":
    from helpers_faults import rows as faults_of_the_tests  # the tests know the class of that module, not of __main__

    for row in faults_of_the_tests():
        print(f"{row.what}: {row.sees or '-'} (exit code {row.code}, kept: {row.kept})")
