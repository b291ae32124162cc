"""Command lines in this process, and the one line by which a command refuses something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from captioning.__main__ import main
from captioning.errors import exits_on_input_error


def command(*words: object) -> None:
    """Run `captioning` with these words."""
    main([str(word) for word in words])


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run `captioning`, check that it ends with exit code 2 and one line, and return that line."""
    return ends(capsys, Fault("", ""), command, *words)


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
