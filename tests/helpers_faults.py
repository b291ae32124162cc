"""Command lines in this process, and the one line with which a command refuses its input."""

import pytest

from captioning.__main__ import main


def command(*words: object) -> None:
    """Run `captioning` with these words."""
    main([str(word) for word in words])


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run `captioning`, check that it ends with exit code 2 and one line, and return that line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        command(*words)
    *others, line = capsys.readouterr().err.strip().splitlines() or [""]
    assert ended.value.code == 2 and line.startswith("error: "), line
    assert not [other for other in others if other.startswith(("error: ", "Traceback", "usage:"))]
    return line
