"""No output of a command replaces an input, a file of a run, or something of another kind."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from helpers import load_script
from helpers_runs import make_run, save_checkpoint

from captioning.cli.arguments import _Parser
from captioning.cli.outputs import STDOUT, OutputFile, refuse_output
from captioning.cli.usage import TOOLS
from captioning.errors import InputError

# Options that take a text and write no file
READ = (
    "images config init_from captions references data study runs imports mirror device license "
    "only overlay_config tokenizer prefix model models notes host"
).split()
# In a folder a command replaces its own files alone
FOLDERS = {
    ("export", "output"): "refuse_other_folder: only a folder that an export wrote",
    ("extract", "output"): "a folder of features: only shards with this manifest",
    ("prepare", "root"): "a data set's folder: only what its manifest lacks",
    ("study", "measurements"): "STUDY.json, to which scores are added",
}


def parsers_of(monkeypatch, main) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of a command and those of its subcommands."""
    taken: list[argparse.ArgumentParser] = []

    def take(parser: argparse.ArgumentParser, *_: object) -> None:
        taken.append(parser)
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(_Parser, "parse_known_args", take)
        with pytest.raises(SystemExit):
            main([])
    yield taken[0]
    for action in taken[0]._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


COMMANDS = {name: lambda name=name: import_module(f"captioning.cli.{name}").main for name in (*TOOLS, "frequencies")}
COMMANDS["demo"] = lambda: load_script("demo").main


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_that_names_a_file_to_write_is_checked_by_the_parser(monkeypatch, command):
    for parser in parsers_of(monkeypatch, COMMANDS[command]()):
        for action in parser._actions:
            takes_text = action.nargs != 0 and not action.choices and action.type in (None, str, Path)
            if takes_text and action.dest not in ("help", *READ):
                assert (command, action.dest) in FOLDERS, f"{command} {action.option_strings}: is it an OutputFile?"


@pytest.mark.parametrize("command", COMMANDS)
def test_no_option_of_a_command_takes_an_empty_value(monkeypatch, command):
    for parser in parsers_of(monkeypatch, COMMANDS[command]()):
        for action in parser._actions:
            for option in action.option_strings if action.nargs != 0 else ():
                for words in ([option, ""], [f"{option}="], [option, " "]):
                    with pytest.raises(InputError, match=rf"^{option}: has an empty value"):
                        parser.parse_known_args(words)
        with pytest.raises(InputError, match=r"^an argument: has an empty value"):
            parser.parse_known_args([""])


OUTPUTS = {
    "average": ("--output", "checkpoint"),
    "bench": ("--json", "JSON"),
    "caption": ("--explorer", "HTML"),
    "compare": ("--output", "HTML"),
    "evaluate": ("--json", "JSON"),
    "frequencies": ("--output", "JSON"),
}
FIRST = {
    "average": ["--model", "a.ckpt", "--model", "b.ckpt"],
    "caption": ["x.png", "--model", "a.ckpt"],
    "compare": ["runs/a", "runs/b"],
    "evaluate": ["--model", "a.ckpt"],
    "frequencies": ["--config", "own.yaml"],
}


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["captioning"])
    for name in "ab":
        folder = make_run(Path("runs", name), captions=[], settings={"model": {}})
        save_checkpoint(folder / "checkpoints/best.ckpt")
        Path(f"{name}.ckpt").write_bytes((folder / "checkpoints/best.ckpt").read_bytes())
    for name in ("own.yaml", "notes.txt", "x.png"):
        Path(name).write_text("model: mine\n")
    return tmp_path


@pytest.mark.parametrize("command", OUTPUTS)
def test_no_command_replaces_a_file_of_a_run_an_input_or_another_kind(workdir, capsys, command):
    before = content_of(workdir)
    option, kind = OUTPUTS[command]
    of_a_run = [str(path) for path in Path("runs/a").rglob("*") if path.is_file()]
    others = ["own.yaml", "notes.txt", "a.ckpt" if kind != "checkpoint" else "x.png"]
    inputs = [word for word in FIRST.get(command, []) if Path(word).is_file()]
    for target in (*of_a_run, *others, *inputs):
        with pytest.raises(SystemExit) as ended:
            COMMANDS[command]()([*FIRST.get(command, []), option, target])
        line = capsys.readouterr().err.strip().splitlines()[-1]
        if command == "caption" and "must end in .html" in line:
            continue
        assert ended.value.code == 2 and f"error: {option} {target}: would replace" in line, line
    assert content_of(workdir) == before


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(InputError, match="is a folder; give a file"):
        refuse_output(tmp_path, "--json", "JSON")


def test_two_options_never_write_one_file(workdir, capsys):
    with pytest.raises(SystemExit):
        COMMANDS["caption"]()([*FIRST["caption"], "--json", "new.html", "--explorer", "./new.html"])
    assert "is the file of two options" in capsys.readouterr().err


def test_what_a_command_wrote_before_is_replaced_and_standard_output_is_no_file(tmp_path):
    for kind, content in (("JSON", '{"a": 1}'), ("JSON", ""), ("HTML", "<!doctype html>"), ("", "anything")):
        path = tmp_path / "out"
        path.write_text(content)
        refuse_output(path, "--output", kind)
    refuse_output(tmp_path / "new", "--output", "JSON", [tmp_path / "new"])
    assert OutputFile("JSON")("-") == STDOUT


def test_files_that_the_user_keeps_in_a_run_folder_are_the_users(tmp_path):
    folder = make_run(tmp_path / "run", captions=[], settings={})
    for name, own in (("captions.jsonl", True), ("test_metrics.json", False), ("notes/test_captions.json", False)):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps({}))
        if own:
            refuse_output(folder / name, "--json", "JSON")
        else:
            with pytest.raises(InputError, match=f"--json .*{name}: would replace a file of the run"):
                refuse_output(folder / name, "--json", "JSON")
