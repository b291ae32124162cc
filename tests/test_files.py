"""A file is the old one or the new one, whatever happens while it is written; a run's folder is found by its files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from captioning.errors import InputError
from captioning.files import _temporary_cache, cache_folder, part_of, replacing, write_json, write_text
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
    assert not part_of(path).exists()


def test_content_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr("captioning.files.os.fsync", lambda number: (done.append("sync"), sync(number)))
    monkeypatch.setattr("captioning.files.os.replace", lambda a, b: (done.append("rename"), rename(a, b)))
    write_text(tmp_path / "a.txt", "new")
    assert done == ["sync", "rename"]


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


@pytest.mark.skipif(os.name == "nt", reason="folders of Unix")
def test_without_a_home_the_cache_is_a_private_folder_in_the_temporary_one(tmp_path, monkeypatch):
    def homeless(*_, **__):
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder("x.json") == tmp_path / "cache/captioning/x.json"
    monkeypatch.setattr("captioning.files.platformdirs.user_cache_path", homeless)
    monkeypatch.setattr("captioning.files.tempfile.tempdir", str(tmp_path))
    for _ in range(2):
        _temporary_cache.cache_clear()
        folder = cache_folder()
        assert folder == tmp_path / f"captioning-{os.getuid()}" and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)  # anybody may have put a file there
    _temporary_cache.cache_clear()
    assert cache_folder() != folder and cache_folder().parent == tmp_path and cache_folder() == cache_folder()
    _temporary_cache.cache_clear()


@pytest.mark.parametrize("folder", [Path("captioning"), Path(".cache/captioning")])
def test_the_cache_never_lies_below_the_working_directory_by_chance(tmp_path, monkeypatch, folder):
    """Code is loaded from it. Some versions of platformdirs return this where HOME is empty or relative."""
    monkeypatch.setattr("captioning.files.platformdirs.user_cache_path", lambda *_, **__: folder)
    monkeypatch.setattr("captioning.files.tempfile.tempdir", str(tmp_path))
    _temporary_cache.cache_clear()
    assert cache_folder("x") == tmp_path / f"captioning-{os.getuid()}" / "x"
    _temporary_cache.cache_clear()


def test_what_utf8_cannot_hold_is_written_as_json_escapes_it(tmp_path):
    write_json(tmp_path / "x.json", {"name": "a\udc80"})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"name": "a\udc80"}
