"""A process that is killed in the middle of a save leaves the old file or the new one, whole."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_faults import Fault, faults, proves
from kill_points import KILLED, in_a_process, watch

from captioning.checkpoint.io import damage_of
from captioning.files import write_json, write_text
from captioning.training.checkpoint_io import AtomicCheckpointIO

OLD, NEW = {"step": 1, "a": torch.zeros(3000)}, {"step": 2, "a": torch.ones(4000)}


def save(path: Path, content: Any) -> None:
    AtomicCheckpointIO().save_checkpoint(content, path)


def read(path: Path) -> Any:
    assert damage_of(path) is None
    return torch.load(path, weights_only=True)["step"]


SAVES: dict[Fault, tuple[Callable[[Path, Any], None], Callable[[Path], Any], Any, Any]] = {
    Fault("SIGKILL at any file operation of a save", "", 137, "the checkpoint before, or the new one"): (
        *(save, read),
        *(OLD, NEW),
    ),
    Fault("SIGKILL while config.yaml or a report is written", "", 137, "the file before, or the new one"): (
        *(write_text, Path.read_text),
        *("old " * 999, "new " * 999),
    ),
    Fault("SIGKILL while scores or captions are written", "", 137, "the file before, or the new one"): (
        *(write_json, lambda path: path.read_text()[-999:]),
        *([1] * 9999, [2] * 9999),
    ),
}


@faults(SAVES)
def test_a_save_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path, fault, case):
    write, look, old, new = case
    path = tmp_path / "x"
    write(path, new)
    after = look(path)
    write(path, old)
    before, contents = look(path), []
    assert before != after
    for number in itertools.count(1):

        def attempt(number: int = number) -> None:
            watch(tmp_path, number)
            write(path, new)

        code = in_a_process(attempt)
        contents.append(look(path))
        if code == 0:
            break
        assert code == KILLED
    assert len(contents) > 7 and contents == sorted(contents, key=lambda content: content != before)
    assert contents[0] == before and contents[-1] == after


def test_what_is_written_is_synced_before_it_gets_its_name(tmp_path):
    """Else a power cut could leave an empty file under the name."""
    seen = tmp_path / "seen"

    def attempt() -> None:
        done = watch(tmp_path / "run", None)
        save(tmp_path / "run/x.ckpt", NEW)
        seen.write_text("\n".join(f"{what} {path}" for what, path in done))

    (tmp_path / "run").mkdir()
    assert in_a_process(attempt) == 0
    done = seen.read_text().splitlines()
    last_write = max(number for number, line in enumerate(done) if line.startswith("write"))
    assert last_write < done.index("fsync x.ckpt.part") < done.index("replace x.ckpt.part")


@pytest.mark.slow
@proves(Fault("SIGKILL at any file operation of a run", "", 137, "a resumed run is equal to the last bit"))
def test_a_run_that_is_killed_anywhere_goes_on_to_the_last_bit(fault):
    script = Path(__file__).with_name("kill_points.py")
    done = subprocess.run([sys.executable, str(script)], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0
