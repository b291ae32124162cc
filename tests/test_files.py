"""A file is the old one or the new one, whatever happens while it is written."""

import json
import os
from pathlib import Path

import pytest

from captioning.cli import json_output
from captioning.errors import InputError
from captioning.files import check_output, replacing, write_json, write_text
from captioning.run_folder import RunFolder


def test_a_file_is_replaced_as_a_whole_and_its_folders_are_made(tmp_path):
    path = tmp_path / "new" / "a.json"
    write_json(path, {"ö": 1})
    write_json(path, {"ö": "a\udc80"}, indent=None)  # what UTF-8 cannot hold is written as JSON escapes it
    assert json.loads(path.read_text(encoding="utf-8")) == {"ö": "a\udc80"}
    assert os.listdir(path.parent) == ["a.json"]


def test_a_metric_without_a_value_is_null_in_the_json_of_a_command(tmp_path, capsys):
    for target in (Path("-"), tmp_path / "a.json"):
        with json_output(target) as numbers:
            numbers |= {"bleu4": [1.5, float("nan")]}
    output = (tmp_path / "a.json").read_text(), capsys.readouterr().out
    assert [text.split() for text in output] == [["{", '"bleu4":', "[", "1.5,", "null", "]", "}"]] * 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interruption_leaves_the_old_file_alone(tmp_path, error):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(error), replacing(path) as temporary:  # noqa: PT012
        temporary.write_text("ne")
        assert path.read_text() == "old"
        raise error
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


def test_an_unwritable_file_is_named_with_its_option(tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "a.html"
    with pytest.raises(InputError, match=rf"^--output {path}: cannot be written \((Not a directory|File exists)\)$"):
        write_text(path, "", "--output")
    message = r"^\S+a.json: cannot be written \(No space left on device\)$"
    with pytest.raises(InputError, match=message), replacing(tmp_path / "a.json"):
        raise OSError(28, "No space left on device")
    assert os.listdir(tmp_path) == ["file"]


def test_a_checkpoint_leads_to_its_run(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "runs" / "a")
    run = RunFolder.of_checkpoint(folder.checkpoint("best"))
    assert run is not None and run.path == folder.path
    assert RunFolder.of_checkpoint(tmp_path / "best.ckpt") is None
    monkeypatch.chdir(tmp_path)
    run = RunFolder.of_checkpoint(folder.checkpoint("last"))
    assert run is not None and run.config == Path("runs/a/config.yaml")


def test_an_output_never_replaces_an_input(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    check_output(tmp_path / "b.txt", "--output", inputs=[tmp_path / "a.txt"])
    with pytest.raises(InputError, match=r"^--output \S+link.txt: would replace \S+a.txt, which is an input"):
        check_output(tmp_path / "link.txt", "--output", inputs=[tmp_path / "b.txt", tmp_path / "a.txt"])


def test_a_path_in_the_home_folder_is_written_to(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_text(Path("~/new/a.txt"), "written")
    assert (tmp_path / "new/a.txt").read_text() == "written"
