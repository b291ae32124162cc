"""Progress of a long task: a bar on standard error, and a line from time to time in a log."""

import io
import sys

import pytest

from captioning.progress import Progress


def test_a_loop_over_a_bar_counts_its_items(capsys):
    assert list(Progress("scoring", items={"a": 1, "b": 2}.items(), unit=" runs")) == [("a", 1), ("b", 2)]
    assert "scoring: 100%" in (err := capsys.readouterr().err) and " 2/2 [" in err


@pytest.mark.parametrize(("terminal", "drawn"), [(True, 5), (False, 2)])
def test_a_bar_starts_at_the_items_done_before_and_is_rarely_printed_in_a_log(monkeypatch, terminal, drawn):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("[a] \x1b[2J", 7300, 100) as progress:
        for _ in range(3):
            progress.start_t -= 20  # seconds
            progress.last_print_t -= 20
            progress.update(400)
    text = stream.getvalue()
    assert text.startswith("\r[a] \\x1b[2J:   1%|") and "1300/7300" in text and "images/s" in text
    assert text.count("\r") >= drawn and (terminal or text.count("\r") <= 4)
