"""A file is the old one or the new one, whatever happens while it is written; a run's folder is found by its files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from captioning.errors import InputError
from captioning.files import refuse_inputs, replacing, write_json, write_text
from captioning.run_folder import RunFolder


def test_a_file_is_replaced_as_a_whole_and_its_folders_are_made(tmp_path):
    path = tmp_path / "new" / "a.json"
    write_json(path, {"ö": 1})
    write_json(path, {"ö": 2}, indent=None)
    assert path.read_text(encoding="utf-8") == '{"ö": 2}\n'
    assert os.listdir(path.parent) == ["a.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interruption_leaves_the_old_file_alone(tmp_path, error):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def interrupted():
        with replacing(path) as part:
            part.write_text("ne")
            assert path.read_text() == "old"
            raise error

    with pytest.raises(error):
        interrupted()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_what_cannot_be_written_is_named_with_its_option(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "a.html"
    with pytest.raises(InputError, match=rf"^--output {path}: cannot be written \(Not a directory\)$|File exists"):
        write_text(path, "", "--output")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("captioning.files.os.fsync", full)
    with pytest.raises(InputError, match=r"^\S+a.json: cannot be written \(No space left on device\)$"):
        write_json(tmp_path / "a.json", 1)
    assert os.listdir(tmp_path) == ["file"]


def test_a_checkpoint_leads_to_its_run(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "runs" / "a")
    run = RunFolder.of(folder.checkpoint("best"))
    assert run is not None and run.path == folder.path
    assert RunFolder.of(tmp_path / "best.ckpt") is None
    monkeypatch.chdir(tmp_path)
    run = RunFolder.of(folder.checkpoint("last"))
    assert run is not None and run.config == Path("runs/a/config.yaml")


def test_an_output_never_replaces_an_input(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    refuse_inputs(tmp_path / "b.txt", [tmp_path / "a.txt"], "--output")
    with pytest.raises(InputError, match=r"^--output \S+link.txt: would replace \S+a.txt, which is an input"):
        refuse_inputs(tmp_path / "link.txt", [tmp_path / "b.txt", tmp_path / "a.txt"], "--output")


def test_what_utf8_cannot_hold_is_written_as_json_escapes_it(tmp_path):
    write_json(tmp_path / "x.json", {"name": "a\udc80"})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"name": "a\udc80"}
