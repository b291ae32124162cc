"""Commands side by side: what they print, how they fail, and that Ctrl-C waits for what they save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from captioning.cli.commands import Commands
from captioning.errors import InputError

SAYS = """
import os
print('epoch 1', 'noise', 'epoch 2 \\x1b[1m', 'epoch ' + os.environ['OMP_NUM_THREADS'], sep=chr(10))
"""


def test_lines_of_progress_are_printed_with_the_name_of_their_command(capsys):
    seconds = Commands(2, "epoch").run("soft", ["-c", SAYS])
    command, *lines, last = capsys.readouterr().out.splitlines()
    assert command.startswith("soft  $ python -c ") and last == f"soft  finished after {seconds:.0f} s"
    assert lines == ["soft  epoch 1", "soft  epoch 2 \\x1b[1m", "soft  epoch 1"]


def test_each_of_several_gets_its_share_of_the_processor(monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    Commands(3, "epoch").run("soft", ["-c", SAYS])
    assert capsys.readouterr().out.splitlines()[-2] == "soft  epoch 2"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; print('a\\nerror: no data;  get them\\nb'); sys.exit(2)", "no data; get them"),
        ("print('1\\n2\\n3\\n4'); raise SystemExit(1)", "2 3 4"),
    ],
)
def test_a_failure_has_its_reason_in_one_line(program, reason):
    with pytest.raises(InputError, match=rf"^soft failed: {reason}$"):
        Commands(1, "epoch").run("soft", ["-c", program])


def test_one_failure_leaves_the_others_alone():
    commands = Commands(2, "epoch")
    found = commands.side_by_side(lambda n: commands.run(str(n), ["-c", f"raise SystemExit({n})"]) and n, range(3))
    assert found[0] == 0 and isinstance(found[1], InputError) and isinstance(found[2], InputError)


INTERRUPTED = """
import sys
from pathlib import Path
from captioning.cli.commands import Commands
from captioning.errors import exits_on_input_error
child = '''
import sys, time
from pathlib import Path
print("epoch", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)
    Path(sys.argv[1]).write_text("saved")
'''
@exits_on_input_error
def main():
    commands = Commands(2, "epoch")
    def task(name):
        commands.run(name, ["-c", child, name])
        Path(name + ".next").touch()
    commands.side_by_side(task, ["a", "b", "c"])
main()
"""


def test_ctrl_c_waits_until_all_have_saved_and_starts_no_other(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=30)
    assert sorted(line.split("  ")[1][:5] for line in lines) == ["$ pyt", "$ pyt", "epoch", "epoch"]
    assert process.returncode == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
