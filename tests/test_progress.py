"""Progress of a long task: lines in a log that grow rarer, a bar on a terminal."""

from __future__ import annotations

import io
import re

from captioning.progress import Progress


def test_a_log_gets_a_line_now_and_then_ever_more_rarely(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Progress("features", 7300, 100) as progress:  # 100 before: resumed
        for second in range(1, 3601):
            now[0] = float(second)
            progress.update(100 + second)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "features: 111 of 7,300 images" and 50 < len(lines) < 100
    seconds = [int(re.search(r": ([\d,]+) of", line)[1].replace(",", "")) - 100 for line in lines]
    assert seconds[:3] == [11, 22, 33] and seconds[-1] - seconds[-2] > 120


def test_a_terminal_gets_a_bar_and_lines_above_it(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", terminal)
    with Progress("a.zip", 5_000_000, unit="bytes") as progress:
        progress.update(4_000_000)
        progress.say("[a] line\x1b[2J")
    assert "a.zip: 4 of 5 MB" in terminal.getvalue() and "[a] line\\x1b[2J" in terminal.getvalue()
